//! The tasks behind the commands, each from its preconditions to its exit code.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{
    EXIT_BUG, EXIT_UNSUITABLE_HOST, EXIT_USAGE, host,
    prepare::{self, Freshness},
    progress::Progress,
    stages::binaries::{self, Wanted},
    tiers::{
        self, Outcome, Selection, TestEnvironment, Tier, blocks, conformance, console,
        dependencies, fuzz,
        hvm::{self, Work},
        integrations,
        isolation::Prover,
        package, smoke, soak,
    },
    tool,
    workspace::Workspace,
};

/// Builds what one scenario starts, and runs it. Returns the exit code of cube-bench.
pub(crate) fn bench(
    workspace: &Workspace,
    scenario: &Path,
    arguments: &[String],
    progress: Progress,
) -> Result<ExitCode> {
    let scenario = absolute(workspace, scenario);
    if !scenario.is_file() {
        // Checked before the build, which may take minutes.
        eprintln!("error: scenario file {} not found", scenario.display());
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    let text = std::fs::read_to_string(&scenario)
        .with_context(|| format!("cannot read {}", scenario.display()))?;
    let binaries = prepare::with_base(
        workspace,
        progress,
        Freshness::Keep,
        Wanted::by_scenario(&text),
    )?;
    let status = Command::new(binaries.bench())
        .current_dir(workspace.root())
        .env("CUBE_ARTIFACTS", workspace.artifacts())
        .env("CUBE_BIN", &binaries.dir)
        .arg("run")
        .arg(&scenario)
        .args(arguments)
        .status()
        .context("cannot start cube-bench")?;
    Ok(exit_code_of(status))
}

/// The exit code of a program, or 130 (the shell's code for an interrupt) if a signal killed it.
fn exit_code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.map_or(ExitCode::from(130), ExitCode::from)
}

/// Resolves a path from the command line against the current directory, then against the root of the checkout.
fn absolute(workspace: &Workspace, path: &Path) -> PathBuf {
    if path.exists() {
        std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
    } else {
        workspace.root().join(path)
    }
}

/// The tiers to run on this host.
#[derive(Debug)]
struct TierPlan {
    run: Vec<Tier>,
    /// Tiers that this host cannot run, each with the missing requirement.
    skipped: Vec<(Tier, String)>,
}

impl TierPlan {
    /// Plans the tiers of a selection. Without KVM on this host, those that need it are skipped, unless they were named:
    /// a named tier fails if the host does not support it.
    fn decide(selection: &Selection) -> Result<Self> {
        let mut plan = Self {
            run: selection.tiers(),
            skipped: Vec::new(),
        };
        if plan.run.iter().any(|tier| *tier != Tier::Unit) {
            host::check_system()?;
        }
        if let Err(lack) = host::check_kvm()
            && !matches!(selection, Selection::Tiers(_))
        {
            let lack = lack.to_string();
            for tier in plan.run.iter().filter(|tier| tier.needs_kvm()) {
                plan.skipped.push((*tier, lack.clone()));
            }
            plan.run.retain(|tier| !tier.needs_kvm());
        }
        Ok(plan)
    }
}

/// Runs the lints, then the tests. The last line on standard output is the summary. If no tier is named and this host has
/// no KVM, runs the tiers that do not need it, and returns exit code 6 if all of them pass.
pub(crate) fn test(
    workspace: &Workspace,
    selection: &Selection,
    progress: Progress,
) -> Result<ExitCode> {
    let plan = TierPlan::decide(selection)?;
    for (tier, lack) in &plan.skipped {
        progress.line(&format!("tier {tier} will be skipped: {lack}"));
    }
    progress.line(&blocks::Blocks::load(workspace)?.summary());
    // A second of work that fails before the minutes of the build.
    let mut outcome = dependencies::check(workspace, progress)?;
    let mut spent = TimeSpent::default();
    let checks = |progress| {
        lint(workspace, progress)?;
        if plan.run.iter().any(|tier| tier.runs_under_cargo()) {
            tiers::build(workspace, progress)?;
        }
        Ok(())
    };
    let environment = spent.on("preparation, lints, build of the tests", || {
        prepare_for(workspace, selection, &plan.run, progress, checks)
    })?;
    let tests: Vec<Tier> = plan
        .run
        .iter()
        .copied()
        .filter(|tier| tier.runs_under_cargo())
        .collect();
    if !tests.is_empty() {
        let cargo = || {
            std::thread::scope(|scope| {
                if plan.run.contains(&Tier::Fuzz) {
                    // On cores that no test uses. The tier builds again what fails here.
                    let idle = || fuzz::build(workspace, workspace.idle_cargo(), progress.beside());
                    scope.spawn(idle);
                }
                tiers::run(workspace, &tests, selection, &environment)
            })
        };
        outcome = outcome.and(spent.on("cargo's tests", cargo)?);
    }
    let mut rest: Vec<Tier> = Tier::value_variants().to_vec();
    rest.retain(|tier| plan.run.contains(tier));
    if BESIDE.iter().all(|tier| rest.contains(tier)) {
        rest.retain(|tier| !BESIDE.contains(tier));
        let beside = || beside(workspace, selection, &environment, progress.beside());
        outcome = outcome.and(spent.on("hvm beside fuzz", beside)?);
    }
    for tier in rest {
        let rest = || beyond_cargo(workspace, tier, selection, &environment, progress);
        outcome = outcome.and(spent.on(&tier.to_string(), rest)?);
    }
    progress.line(&spent.summary());
    Ok(conclude(&outcome, &plan))
}

/// Tiers that run at the same time: the emulator of `hvm` uses one core, and neither looks at times.
const BESIDE: [Tier; 2] = [Tier::Hvm, Tier::Fuzz];

fn beside(
    workspace: &Workspace,
    selection: &Selection,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    std::thread::scope(|scope| {
        let run = |tier| beyond_cargo(workspace, tier, selection, environment, progress);
        let threads = BESIDE.map(|tier| scope.spawn(move || run(tier)));
        let mut outcome = Outcome::default();
        // Each is waited for, so that an error of one does not end the other.
        let ended = threads.map(|thread| thread.join().map_err(std::panic::resume_unwind));
        for one in ended {
            outcome = outcome.and(one??);
        }
        Ok(outcome)
    })
}

/// Runs the parts of a tier that are not cargo tests.
fn beyond_cargo(
    workspace: &Workspace,
    tier: Tier,
    selection: &Selection,
    environment: &TestEnvironment,
    progress: Progress,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let is_whole = selection.is_whole();
    match tier {
        Tier::Unit | Tier::Net | Tier::Image | Tier::Kvm | Tier::Cluster => {}
        Tier::Interpreter => {
            let part = conformance::INTERPRETER;
            outcome = conformance::run(workspace, &part, environment, progress)?;
        }
        Tier::Hvm => outcome = hvm::run(workspace, progress, &Work::Steps)?,
        Tier::HvmVmx => outcome = hvm::run(workspace, progress, &Work::Vmx)?,
        Tier::Fuzz => outcome = fuzz::run(workspace, progress)?,
        Tier::Isolation => {
            let provers: &[Prover] = if is_whole {
                &Prover::ALL
            } else {
                &Prover::USUAL
            };
            for prover in provers {
                outcome = outcome.and(prover.run(workspace, environment)?);
            }
        }
        Tier::E2b => {
            let part = if is_whole {
                &conformance::SANDBOX
            } else {
                &conformance::SANDBOX_USUAL
            };
            outcome = conformance::run(workspace, part, environment, progress)?;
            outcome = outcome.and(blocks::run(workspace, environment, &[])?);
        }
        Tier::Bench => outcome = smoke::run(workspace, environment)?,
        Tier::Console => outcome = console::run(workspace, environment, progress)?,
        Tier::Package => outcome = package::run(workspace, environment, progress)?,
        Tier::Integrations => outcome = integrations::run(workspace, environment, progress)?,
    }
    Ok(outcome)
}

/// Time that each part of a test run took.
#[derive(Debug, Default)]
struct TimeSpent(Vec<(String, Duration)>);

impl TimeSpent {
    fn on<T>(&mut self, part: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = work();
        self.0.push((part.to_owned(), started.elapsed()));
        result
    }

    /// One line: the minutes of each part that took at least three seconds.
    fn summary(&self) -> String {
        let minutes = |time: &Duration| time.as_secs_f64() / 60.0;
        let long = |(_, time): &&(String, Duration)| time.as_secs() >= 3;
        let parts = self.0.iter().filter(long);
        let parts: Vec<_> = parts
            .map(|(part, time)| format!("{part} {:.1}", minutes(time)))
            .collect();
        let all = minutes(&self.0.iter().map(|(_, time)| time).sum());
        format!("minutes: {}; {all:.1} in all", parts.join(", "))
    }
}

/// Builds everything and runs the conformance suite. Returns the exit code of cube-bench.
pub(crate) fn verify(
    workspace: &Workspace,
    arguments: &[String],
    progress: Progress,
) -> Result<ExitCode> {
    let binaries = prepare::all(workspace, progress, Freshness::Keep)?;
    prepare::sdks(workspace, progress)?;
    let status = conformance::command(workspace, &binaries.dir)
        .args(arguments)
        .status()
        .context("cannot start cube-bench")?;
    Ok(exit_code_of(status))
}

/// Runs the tier `hvm` or `hvm-vmx` alone, or the confinement prover on the machine where that tier runs.
pub(crate) fn hvm(workspace: &Workspace, progress: Progress, work: &Work) -> Result<ExitCode> {
    let outcome = hvm::run(workspace, progress, work)?;
    let tier = match work {
        Work::Steps | Work::Prover(_) | Work::NewerKernel => Tier::Hvm,
        Work::Vmx => Tier::HvmVmx,
    };
    let plan = TierPlan {
        run: vec![tier],
        skipped: Vec::new(),
    };
    Ok(conclude(&outcome, &plan))
}

/// Runs the blocks of the tier `e2b` in these documents, or in all, without building anything.
pub(crate) fn blocks(workspace: &Workspace, only: &[String]) -> Result<ExitCode> {
    let environment = TestEnvironment {
        artifacts: workspace.artifacts(),
        binaries: Some(workspace.artifacts().join("bin")),
        later_vmms: None,
    };
    let outcome = blocks::run(workspace, &environment, only)?;
    println!("{}", outcome.counts);
    Ok(crate::success_or_bug(outcome.success))
}

/// Plays seeds of the simulation of a cluster. Returns the exit code of the test.
pub(crate) fn simulate_cluster(workspace: &Workspace, seeds: u64) -> Result<ExitCode> {
    let mut test = workspace.cargo();
    test.args(["test", "--release", "--package", "cluster", "--lib"]);
    test.args(["simulation::many_seeds", "--", "--nocapture"]);
    test.env("CUBE_SIMULATION_SEEDS", seeds.to_string());
    let status = test.status().context("cannot start cargo")?;
    Ok(exit_code_of(status))
}

/// Runs the tier `soak`.
pub(crate) fn soak(
    workspace: &Workspace,
    only: Option<&str>,
    progress: Progress,
) -> Result<ExitCode> {
    let environment = TestEnvironment {
        artifacts: workspace.artifacts(),
        binaries: Some(prepare::soak(workspace, progress)?.dir),
        later_vmms: None,
    };
    let outcome = soak::run(workspace, &environment, only)?;
    println!("{}", outcome.counts);
    Ok(crate::success_or_bug(outcome.success))
}

/// Builds the binaries and templates that these tiers need, and calls `checks` when the host's packages are there.
fn prepare_for(
    workspace: &Workspace,
    selection: &Selection,
    tiers: &[Tier],
    progress: Progress,
    checks: impl FnOnce(Progress) -> Result<()> + Send,
) -> Result<TestEnvironment> {
    let artifacts = workspace.artifacts();
    if tiers.contains(&Tier::Fuzz) {
        fuzz::compiler(workspace, progress)?;
    }
    // The tests of guests in the tier kvm make images with the same tools.
    let is_whole = selection.is_whole();
    if tiers.contains(&Tier::Image) || tiers.contains(&Tier::Kvm) && is_whole {
        prepare::image_tools(workspace, progress)?;
    }
    if tiers.contains(&Tier::Cluster) {
        prepare::cluster_tools(workspace, progress)?;
    }
    // The console runs cells on the template of the interpreter, which is also a package.
    let needs_interpreter = [Tier::Interpreter, Tier::Console, Tier::Package];
    let binaries = if needs_interpreter.iter().any(|tier| tiers.contains(tier)) {
        Some(prepare::code_interpreter(workspace, progress, checks)?.dir)
    } else {
        let needs_kvm = tiers.iter().any(|tier| tier.needs_kvm());
        let all = || prepare::all(workspace, progress, Freshness::Keep);
        let binaries = needs_kvm.then(all).transpose()?;
        checks(progress)?;
        binaries.map(|binaries| binaries.dir)
    };
    let later_vmms = if tiers.contains(&Tier::Kvm) && is_whole {
        let log = artifacts.join("log/later-vmms.log");
        std::fs::write(&log, "")?;
        Some(binaries::build_later_vmms(workspace, progress, &log)?)
    } else {
        None
    };
    Ok(TestEnvironment {
        artifacts,
        binaries,
        later_vmms,
    })
}

fn lint(workspace: &Workspace, progress: Progress) -> Result<()> {
    let log = workspace.artifacts().join("log/lint.log");
    std::fs::create_dir_all(workspace.artifacts().join("log"))?;
    std::fs::write(&log, "")?;
    progress.stage("format", || {
        tool::run(
            workspace
                .cargo()
                .args(["fmt", "--all", "--", "--check", "--color=never"]),
            &log,
        )
    })?;
    progress.stage("clippy", || {
        let mut clippy = workspace.cargo();
        clippy.args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]);
        tool::run(&mut clippy, &log)
    })
}

fn conclude(outcome: &Outcome, plan: &TierPlan) -> ExitCode {
    for (tier, lack) in &plan.skipped {
        eprintln!("tier {tier} skipped: {lack}");
    }
    println!("{}", outcome.counts);
    ExitCode::from(match (outcome.success, plan.skipped.is_empty()) {
        (false, _) => EXIT_BUG,
        (true, false) => EXIT_UNSUITABLE_HOST,
        (true, true) => 0,
    })
}
