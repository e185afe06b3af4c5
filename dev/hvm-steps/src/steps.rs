//! The steps, in order. A step may use state from earlier steps. After a failed step, the rest is not run.

mod clones;
mod exits;
mod failures;
mod guest;
mod large;
mod other_cpu;
mod prover;
mod state;

use std::{process::Command, time::Instant};

use anyhow::{Context as _, Result, ensure};

use crate::config::Config;
use exits::Exits;
use state::State;

/// A step's name, and the function that runs it and returns a note for its result line.
type Step = (&'static str, fn(&mut State<'_>) -> Result<String>);

const STEPS: [Step; 20] = [
    ("probe", probe),
    ("boot to the agent", guest::boot),
    ("exec", guest::exec),
    ("disk under load", guest::disk),
    ("vsock under load", guest::vsock),
    ("network under load", guest::network),
    ("snapshot", clones::snapshot),
    ("read the root image", clones::whole_image),
    ("restore twice", clones::restore_twice),
    ("identities differ", clones::identities),
    ("touch 4096 pages", clones::touch),
    ("snapshot of a clone", clones::second_generation),
    ("diff of a clone", clones::diff),
    ("4 vCPUs", large::four_vcpus),
    ("confinement", prover::confinement),
    ("more than 3 GiB", large::above_the_hole),
    ("exit reasons", failures::ends),
    ("kill -9", failures::kill),
    ("bad snapshots", failures::bad_snapshots),
    ("keep a template", other_cpu::keep),
];
/// The steps on an additional emulated host that only gets the templates of others.
const STEPS_OF_OTHER_CPU: [Step; 2] = [
    ("probe", probe),
    ("templates of others", other_cpu::templates),
];
/// The steps on an additional emulated host.
const STEPS_IN_BRIEF: [Step; 10] = [
    ("probe", probe),
    ("templates of others", other_cpu::templates),
    ("boot to the agent", guest::boot),
    ("exec", guest::exec),
    ("snapshot", clones::snapshot),
    ("restore twice", clones::restore_twice),
    ("identities differ", clones::identities),
    ("touch 4096 pages", clones::touch),
    ("diff of a clone", clones::diff),
    ("keep a template", other_cpu::keep),
];
/// The steps for `--confinement`: those that the prover needs, and the prover.
const STEPS_OF_PROVER: [Step; 4] = [
    ("probe", probe),
    ("boot to the agent", guest::boot),
    ("snapshot", clones::snapshot),
    ("chosen cases", prover::chosen_cases),
];

/// Runs the steps that `config` selects and prints a result line for each.
///
/// # Errors
/// Returns the error of the first step that fails. The steps after it are not run.
pub(crate) fn run(config: &Config) -> Result<()> {
    if config.cases.is_some() {
        perform(config, &STEPS_OF_PROVER)
    } else if config.brief {
        perform(config, &STEPS_IN_BRIEF)
    } else if config.templates.is_empty() {
        perform(config, &STEPS)
    } else {
        perform(config, &STEPS_OF_OTHER_CPU)
    }
}

fn perform(config: &Config, steps: &[Step]) -> Result<()> {
    let mut state = State::new(config);
    let whole = Instant::now();
    for (name, step) in steps {
        if config.skip.iter().any(|word| name.contains(&**word)) {
            println!("skip {name}");
            continue;
        }
        println!("begin {name}");
        let (start, exits) = (Instant::now(), Exits::read());
        let done = step(&mut state);
        let seconds = start.elapsed().as_secs_f64();
        match done {
            Ok(note) => {
                println!("step {name:<20} passed {seconds:6.2} s  {note}");
                println!("kvm  {name:<20} {}", exits.since());
            }
            Err(error) => {
                println!("step {name:<20} FAILED {seconds:6.2} s");
                for vm in state.vm.iter().chain(&state.clones) {
                    println!("{}: {}", vm.hostname, vm.console_tail());
                }
                return Err(error.context(format!("step {name:?}")));
            }
        }
        if config
            .only
            .as_deref()
            .is_some_and(|only| name.contains(only))
        {
            break;
        }
    }
    println!("all steps passed in {:.1} s", whole.elapsed().as_secs_f64());
    Ok(())
}

/// `cube-vmm probe` reports the platform `hvm`.
fn probe(state: &mut State<'_>) -> Result<String> {
    let output = Command::new(&state.config.vmm).arg("probe").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found: serde_json::Value = serde_json::from_str(&text).with_context(|| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        format!("`cube-vmm probe` printed {text:?} {stderr}")
    })?;
    ensure!(found["platform"] == "hvm", "the probe reports {text}");
    Ok(found["why"].as_str().unwrap_or_default().to_owned())
}
