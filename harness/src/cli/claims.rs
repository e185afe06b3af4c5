//! `cube-bench verify-claims`: compares figures in documents with recorded or repeated runs.

use std::path::{Path, PathBuf};

use clap::Args;
use harness::{
    claims, record,
    session::{self, Settings},
    summary::fold,
};
use testbed::{
    artifacts,
    exit::End,
    options::{Places, RunRoot},
};

use super::CommandError;

#[derive(Args)]
pub(super) struct VerifyClaims {
    /// Root of the repository
    #[arg(long, value_name = "DIR", default_value = ".")]
    root: PathBuf,
    /// Write the figures of the quoted runs into the documents and into claims.toml first
    #[arg(long)]
    write: bool,
    /// Repeat the quoted runs, or only RUN, and compare the 95 % intervals: exit code 3 if a figure drifted, 5
    /// if one could not be compared
    #[arg(long, value_name = "RUN", num_args = 0..=1, default_missing_value = "")]
    rerun: Option<String>,
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
}

impl VerifyClaims {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        let root = &self.root;
        if self.write {
            println!("{} figures written", claims::write(root)?);
        }
        match self.rerun {
            None => verify_claims(root),
            Some(only) => rerun_claims(root, &only, &self.places, &self.run_root.run_root),
        }
    }
}

fn verify_claims(root: &Path) -> Result<End, CommandError> {
    let checked = claims::verify(root)?;
    for wrong in &checked.wrong {
        println!("{wrong}");
    }
    println!(
        "{} figures compared, {} faults",
        checked.figures,
        checked.wrong.len()
    );
    Ok(if checked.wrong.is_empty() {
        End::Pass
    } else {
        End::GateFailed
    })
}

/// Repeats the quoted runs with their recorded scenarios. An empty `only` selects all runs.
fn rerun_claims(
    root: &Path,
    only: &str,
    places: &Places,
    run_root: &Path,
) -> Result<End, CommandError> {
    let mut runs = claims::runs(root)?;
    if !only.is_empty() {
        runs.retain(|run| run == only);
    }
    let (mut agree, mut drifted, mut undecided) = (0, 0, 0);
    for run in &runs {
        let published = root.join("results").join(run);
        let events = record::read(&published)?;
        let summary = fold::fold(&events);
        let started = summary.started.ok_or(CommandError::NoRun(published))?;
        let settings = Settings {
            artifacts: places
                .artifacts
                .clone()
                .unwrap_or_else(artifacts::default_dir),
            vmm: places.vmm.clone(),
            api: places.api.clone(),
            probe: None,
            etcd: None,
            results: None,
            server_pid: None,
            run_root: run_root.to_owned(),
            reproduce: started.reproduce.clone(),
        };
        let again = session::run(&started.scenario, &settings)?;
        let drift = claims::drift(claims::Rerun {
            root,
            run,
            again: &again,
        })?;
        for line in drift.drifted.iter().chain(&drift.undecided) {
            println!("{run}: {line}");
        }
        agree += drift.agree;
        drifted += drift.drifted.len();
        undecided += drift.undecided.len();
    }
    println!("{agree} figures agree, {drifted} drifted, {undecided} not compared");
    Ok(match (runs.is_empty(), drifted, undecided) {
        (true, ..) => End::Usage,
        (false, 0, 0) => End::Pass,
        (false, 0, _) => End::Inconclusive,
        (false, ..) => End::GateFailed,
    })
}
