//! The tasks behind the commands, each from its preconditions to its exit code.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

use anyhow::{Context, Result};

use crate::{
    EXIT_BUG, EXIT_UNSUITABLE_HOST, EXIT_USAGE, binaries, blocks, conformance, console,
    dependencies, fuzz, host,
    hvm::{self, Work},
    isolation::Prover,
    package, prepare,
    prepare::Freshness,
    progress::Progress,
    smoke, soak,
    tiers::{self, Outcome, TestEnvironment, Tier},
    tool,
    workspace::Workspace,
};

/// Builds everything and runs one scenario. Returns the exit code of cube-bench.
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
    let binaries = prepare::all(workspace, progress, Freshness::Keep)?;
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
    /// Plans the tiers in `requested`. If it is empty, plans all usual tiers; without KVM on this host, the tiers that
    /// need it are skipped. A requested tier is never skipped: it fails if the host does not support it.
    fn decide(requested: &[Tier]) -> Result<Self> {
        let mut plan = Self {
            run: requested.to_vec(),
            skipped: Vec::new(),
        };
        if requested.is_empty() {
            plan.run = Tier::USUAL.to_vec();
        }
        if plan.run.iter().any(|tier| *tier != Tier::Unit) {
            host::check_system()?;
        }
        if let Err(lack) = host::check_kvm()
            && requested.is_empty()
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

/// Runs the lints, then the tests. The last line on standard output is the summary. If `requested` is empty and this
/// host has no KVM, runs the tiers that do not need it, and returns exit code 6 if all of them pass.
pub(crate) fn test(
    workspace: &Workspace,
    requested: &[Tier],
    progress: Progress,
) -> Result<ExitCode> {
    let plan = TierPlan::decide(requested)?;
    for (tier, lack) in &plan.skipped {
        progress.line(&format!("tier {tier} will be skipped: {lack}"));
    }
    progress.line(&blocks::Blocks::load(workspace)?.summary());
    let environment = prepare_for(workspace, &plan.run, progress)?;
    lint(workspace, progress)?;
    let mut outcome = dependencies::check(workspace, progress)?;
    let tests: Vec<Tier> = plan
        .run
        .iter()
        .copied()
        .filter(|tier| tier.runs_under_cargo())
        .collect();
    if !tests.is_empty() {
        outcome = outcome.and(tiers::run(workspace, &tests, &environment)?);
    }
    if plan.run.contains(&Tier::Hvm) {
        outcome = outcome.and(hvm::run(workspace, progress, &Work::Steps)?);
    }
    if plan.run.contains(&Tier::Fuzz) {
        outcome = outcome.and(fuzz::run(workspace, progress)?);
    }
    if plan.run.contains(&Tier::Isolation) {
        for prover in [
            Prover::Isolation,
            Prover::Confinement,
            Prover::Restarts,
            Prover::Lifecycle,
        ] {
            outcome = outcome.and(prover.run(workspace, &environment)?);
        }
    }
    for (tier, part) in [
        (Tier::Interpreter, conformance::INTERPRETER),
        (Tier::E2b, conformance::SANDBOX),
    ] {
        if plan.run.contains(&tier) {
            let cells = conformance::run(workspace, &part, &environment, progress)?;
            outcome = outcome.and(cells);
        }
    }
    if plan.run.contains(&Tier::E2b) {
        outcome = outcome.and(blocks::run(workspace, &environment)?);
    }
    if plan.run.contains(&Tier::Bench) {
        outcome = outcome.and(smoke::run(workspace, &environment)?);
    }
    if plan.run.contains(&Tier::Console) {
        outcome = outcome.and(console::run(workspace, &environment, progress)?);
    }
    if plan.run.contains(&Tier::Package) {
        outcome = outcome.and(package::run(workspace, &environment, progress)?);
    }
    Ok(conclude(&outcome, &plan))
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

/// Runs the tier `hvm` alone, or the confinement prover on the machine where that tier runs.
pub(crate) fn hvm(workspace: &Workspace, progress: Progress, work: &Work) -> Result<ExitCode> {
    let outcome = hvm::run(workspace, progress, work)?;
    let plan = TierPlan {
        run: vec![Tier::Hvm],
        skipped: Vec::new(),
    };
    Ok(conclude(&outcome, &plan))
}

/// Runs the documents' blocks of the tier `e2b` without building anything.
pub(crate) fn blocks(workspace: &Workspace) -> Result<ExitCode> {
    let environment = TestEnvironment {
        artifacts: workspace.artifacts(),
        binaries: Some(workspace.artifacts().join("bin")),
        later_vmms: None,
    };
    let outcome = blocks::run(workspace, &environment)?;
    println!("{}", outcome.counts);
    Ok(crate::success_or_bug(outcome.success))
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

/// Builds the binaries and templates that these tiers need.
fn prepare_for(
    workspace: &Workspace,
    tiers: &[Tier],
    progress: Progress,
) -> Result<TestEnvironment> {
    let artifacts = workspace.artifacts();
    // The tests of guests in tier kvm make images with the same tools.
    if tiers.contains(&Tier::Image) || tiers.contains(&Tier::Kvm) {
        prepare::image_tools(workspace, progress)?;
    }
    let binaries = if tiers.contains(&Tier::Interpreter) {
        Some(prepare::code_interpreter(workspace, progress)?.dir)
    } else if tiers.iter().any(|tier| tier.needs_kvm()) {
        Some(prepare::all(workspace, progress, Freshness::Keep)?.dir)
    } else {
        None
    };
    let later_vmms = if tiers.contains(&Tier::Kvm) {
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
    for tier in Tier::USUAL.iter().filter(|tier| !plan.run.contains(tier)) {
        let lack = plan.skipped.iter().find(|(skipped, _)| skipped == tier);
        let reason = lack.map_or("not requested", |(_, lack)| lack);
        eprintln!("tier {tier} skipped: {reason}");
    }
    println!("{}", outcome.counts);
    ExitCode::from(match (outcome.success, plan.skipped.is_empty()) {
        (false, _) => EXIT_BUG,
        (true, false) => EXIT_UNSUITABLE_HOST,
        (true, true) => 0,
    })
}
