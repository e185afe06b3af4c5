//! What each task does, from its preconditions to its last line.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result};

use crate::{
    EXIT_BUG, EXIT_UNSUITABLE_HOST, EXIT_USAGE, conformance, dependencies, fuzz, host,
    hvm::{self, Work},
    isolation::Prover,
    prepare,
    prepare::Freshness,
    progress::Progress,
    tiers::{self, Outcome, Surroundings, Tier},
    tool,
    workspace::Workspace,
};

/// Prepares and runs one scenario; the exit code is cube-bench's own.
pub(crate) fn bench(
    workspace: &Workspace,
    scenario: &Path,
    arguments: &[String],
    progress: Progress,
) -> Result<ExitCode> {
    let scenario = absolute(workspace, scenario);
    if !scenario.is_file() {
        // Said now rather than after minutes of preparation.
        eprintln!("error: there is no scenario {}", scenario.display());
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
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    // Ended by a signal: as a shell says it for an interrupt.
    Ok(code.map_or(ExitCode::from(130), ExitCode::from))
}

/// As the person who typed it means it: from where they stand, or from the checkout's root.
fn absolute(workspace: &Workspace, path: &Path) -> PathBuf {
    if path.exists() {
        std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
    } else {
        workspace.root().join(path)
    }
}

/// Which tiers a host gets, decided but not run.
#[derive(Debug)]
struct TierPlan {
    run: Vec<Tier>,
    /// Tiers that this host cannot run, with what it lacks.
    skipped: Vec<(Tier, String)>,
}

impl TierPlan {
    /// All usual tiers, less those that need a KVM which is not there. Tiers asked for by name must run.
    fn decide(asked: &[Tier]) -> Result<Self> {
        let mut plan = Self {
            run: asked.to_vec(),
            skipped: Vec::new(),
        };
        if asked.is_empty() {
            plan.run = Tier::USUAL.to_vec();
        }
        if plan.run.iter().any(|tier| *tier != Tier::Unit) {
            host::check_system()?;
        }
        if let Err(lack) = host::check_kvm()
            && asked.is_empty()
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

/// Lints, then the tests; the last line on standard output is the summary. A host that lacks something
/// gets the tiers it can run, and exit code 6.
pub(crate) fn test(workspace: &Workspace, asked: &[Tier], progress: Progress) -> Result<ExitCode> {
    let plan = TierPlan::decide(asked)?;
    for (tier, lack) in &plan.skipped {
        progress.say(&format!("tier {tier:?} will be skipped: {lack}"));
    }
    let surroundings = surroundings(workspace, &plan.run, progress)?;
    lint(workspace, progress)?;
    let mut outcome = dependencies::check(workspace, progress)?;
    let tests: Vec<Tier> = plan.run.iter().copied().filter(|t| t.is_cargos()).collect();
    if !tests.is_empty() {
        outcome = outcome.and(tiers::run(workspace, &tests, &surroundings)?);
    }
    if plan.run.contains(&Tier::Hvm) {
        outcome = outcome.and(hvm::run(workspace, progress, &Work::Steps)?);
    }
    if plan.run.contains(&Tier::Fuzz) {
        outcome = outcome.and(fuzz::run(workspace, progress)?);
    }
    if plan.run.contains(&Tier::Isolation) {
        for prover in [Prover::Isolation, Prover::Confinement] {
            outcome = outcome.and(prover.run(workspace, &surroundings)?);
        }
    }
    for (tier, part) in [
        (Tier::Interpreter, conformance::INTERPRETER),
        (Tier::E2b, conformance::SANDBOX),
    ] {
        if plan.run.contains(&tier) {
            let cells = conformance::run(workspace, &part, &surroundings, progress)?;
            outcome = outcome.and(cells);
        }
    }
    Ok(conclude(&outcome, &plan))
}

/// Prepares everything and runs the conformance suite; the exit code is cube-bench's own.
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
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::from(130), ExitCode::from))
}

/// The tier hvm alone, or the confinement prover where it runs.
pub(crate) fn hvm(workspace: &Workspace, progress: Progress, work: &Work) -> Result<ExitCode> {
    let outcome = hvm::run(workspace, progress, work)?;
    let plan = TierPlan {
        run: vec![Tier::Hvm],
        skipped: Vec::new(),
    };
    Ok(conclude(&outcome, &plan))
}

/// The long tests.
pub(crate) fn soak(workspace: &Workspace, progress: Progress) -> Result<ExitCode> {
    let surroundings = surroundings(workspace, &[Tier::Soak], progress)?;
    let outcome = tiers::run(workspace, &[Tier::Soak], &surroundings)?;
    let plan = TierPlan {
        run: vec![Tier::Soak],
        skipped: Vec::new(),
    };
    Ok(conclude(&outcome, &plan))
}

/// Prepares what the tiers need and no more.
fn surroundings(workspace: &Workspace, tiers: &[Tier], progress: Progress) -> Result<Surroundings> {
    let artifacts = workspace.artifacts();
    let binaries = if tiers.contains(&Tier::Interpreter) {
        Some(prepare::code_interpreter(workspace, progress)?.dir)
    } else if tiers.iter().any(|tier| tier.needs_kvm()) {
        Some(prepare::all(workspace, progress, Freshness::Keep)?.dir)
    } else {
        None
    };
    Ok(Surroundings {
        artifacts,
        binaries,
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
        let why = lack.map_or("not asked for", |(_, lack)| lack);
        eprintln!("tier {tier:?} skipped: {why}");
    }
    println!("{}", outcome.counts);
    ExitCode::from(match (outcome.success, plan.skipped.is_empty()) {
        (false, _) => EXIT_BUG,
        (true, false) => EXIT_UNSUITABLE_HOST,
        (true, true) => 0,
    })
}
