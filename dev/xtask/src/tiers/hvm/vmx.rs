//! The tier `hvm-vmx`: the steps on Intel machines that Bochs emulates, with VMX and EPT. The first machine keeps its
//! template for the others, and so does an AMD machine that QEMU emulates.

use std::path::Path;

use anyhow::Result;

use super::{
    bochs::{self, Bochs, Cpu},
    host_files::{self, HostFiles},
    qemu, watch,
};
use crate::{
    progress::Progress,
    stages::{binaries::StaticBinaries, kernel::Origin, stage::Store},
    tiers::Outcome,
    workspace::Workspace,
};

/// An i7-4770, without APICv and TSC scaling.
const HASWELL: Cpu = Cpu {
    model: "corei7_haswell_4770",
    mhz: 100,
};
const HASWELL_OF_OTHER_RATE: Cpu = Cpu { mhz: 80, ..HASWELL };
/// An i7-7800X, with AVX-512, APICv, posted interrupts, PML and TSC scaling.
const SKYLAKE: Cpu = Cpu {
    model: "corei7_skylake_x",
    mhz: 80,
};

/// A machine, and the words on its command line.
struct Run {
    name: &'static str,
    cpu: Cpu,
    words: &'static str,
}

const RUNS: [Run; 5] = [
    Run {
        name: "haswell",
        cpu: HASWELL,
        // Steps with more than 3 GiB or with the whole root image hash them for minutes.
        words: "hvm_steps.keep=haswell hvm_steps.skip=more,root",
    },
    Run {
        name: "skylake",
        cpu: SKYLAKE,
        // Leaf 0x15 of the model has the rate of the real CPU.
        words: "tsc_early_khz=80000 hvm_steps.brief=1 hvm_steps.keep=skylake \
                hvm_steps.templates=haswell:restores,amd:AuthenticAMD",
    },
    Run {
        name: "other-rate",
        cpu: HASWELL_OF_OTHER_RATE,
        words: "hvm_steps.templates=haswell:kHz,skylake:avx512f+*,amd:AuthenticAMD",
    },
    Run {
        name: "no-unrestricted-guest",
        cpu: HASWELL,
        words: "kvm_intel.unrestricted_guest=0 hvm_steps.templates=haswell:restores",
    },
    Run {
        name: "no-ept",
        cpu: HASWELL,
        words: "kvm_intel.ept=0 hvm_steps.templates=haswell:restores",
    },
];

/// The words of the AMD machine, which only keeps a template.
const AMD: &str =
    "hvm_steps.brief=1 hvm_steps.keep=amd hvm_steps.skip=exec,restore,identities,touch,diff";

/// Runs the steps on all machines, one after another. A machine whose steps fail does not stop the others.
pub(super) fn run(
    workspace: &Workspace,
    progress: Progress,
    binaries: &StaticBinaries,
    log: &Path,
) -> Result<Outcome> {
    let logs = workspace.artifacts().join("log");
    qemu::install(workspace, progress, log)?;
    let store = Store::open(&workspace.artifacts(), progress)?;
    let kept = host_files::kept_disk(workspace, log)?;
    let kernels = (Origin::Release, Origin::Release);
    let files = |modules: &[&str]| {
        HostFiles::prepare(&store, workspace, binaries, (modules, &kept), kernels)
    };
    progress.line("tier hvm-vmx: running on an emulated AMD machine, which keeps a template");
    let amd = files(&qemu::MODULES)?;
    let own = logs.join("hvm-vmx-amd.log");
    let mut outcome = watch(qemu::command(&amd, &[], AMD), &own)?;
    let files = files(&bochs::MODULES)?;
    let bochs = Bochs::prepare(&store, progress, &files.kernel)?;
    let dir = workspace.artifacts().join("tmp/bochs");
    for Run { name, cpu, words } in RUNS {
        let own = logs.join(format!("hvm-vmx-{name}.log"));
        progress.line(&format!(
            "tier hvm-vmx: running on the machine {name} ({}, {} MHz); its console output goes to {}",
            cpu.model,
            cpu.mhz,
            own.display()
        ));
        let command = bochs.command(cpu, &files, words, &dir, log)?;
        outcome = outcome.and(watch(command, &own)?);
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_read_the_options_of_all_machines() {
        let steps = include_str!("../../../../hvm-steps/src/emulated_host.rs");
        let words = RUNS.iter().map(|run| run.words).chain([AMD]);
        let options = words.flat_map(str::split_whitespace);
        for option in options.filter(|word| word.starts_with("hvm_steps.")) {
            let (name, _) = option.split_once('=').unwrap();
            assert!(steps.contains(&format!("{name:?}")), "{name}");
        }
    }

    /// Templates are kept before machines use them.
    #[test]
    fn each_template_was_kept_by_an_earlier_machine() {
        let value = |words: &'static str, name: &str| {
            words
                .split_whitespace()
                .find_map(|word| word.strip_prefix(name))
        };
        let mut kept = vec![value(AMD, "hvm_steps.keep=")];
        for Run { words, .. } in RUNS {
            let used = value(words, "hvm_steps.templates=").unwrap_or_default();
            for template in used.split(',').filter(|text| !text.is_empty()) {
                let name = template.split(':').next();
                assert!(kept.contains(&name), "{words}");
            }
            kept.push(value(words, "hvm_steps.keep="));
        }
    }
}
