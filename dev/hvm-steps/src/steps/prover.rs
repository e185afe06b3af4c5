//! Steps that run the confinement prover.

use std::fs;

use anyhow::{Result, ensure};

use super::state::{ONE, SMP, State};
use crate::confinement::{STATE_CLASS, prove};

/// The least number of classes that a run of all cases must cover.
const CLASSES: usize = 16;

/// Runs all cases on VMs with one vCPU, then the class `state` on VMs with four vCPUs, whose VMM has a thread for each
/// further vCPU.
pub(super) fn confinement(state: &mut State<'_>) -> Result<String> {
    let smp = state.template(SMP);
    let all = prove(state.config, &state.template(ONE), &[])?;
    ensure!(
        all.classes >= CLASSES,
        "the prover ran only {} classes of cases, expected at least {CLASSES}",
        all.classes
    );
    let of_smp = prove(state.config, &smp, &[STATE_CLASS.to_owned()])?;
    fs::remove_dir_all(&smp)?;
    Ok(format!(
        "{all} passed; {} cases on VMs with 4 vCPUs",
        of_smp.cases
    ))
}

/// Runs the cases and classes given with `--confinement`.
pub(super) fn chosen_cases(state: &mut State<'_>) -> Result<String> {
    state.vm = None;
    let cases = state.config.cases.as_deref().unwrap_or_default();
    let passed = prove(state.config, &state.template(ONE), cases)?;
    Ok(format!("{passed} passed"))
}
