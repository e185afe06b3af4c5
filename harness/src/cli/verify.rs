//! The commands that verify: features, confinement, what clones share.

use std::{
    io::{Read, Write},
    net::IpAddr,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand, ValueEnum};
use testbed::{artifacts, exit::End};
use verify::{
    confinement::{self, ConfinementError, ConfinementSpec, Starts, report as held_report},
    conformance::{
        self, Matrix, Programs, VerifyError, VerifySpec, features::Area, report as matrix_report,
    },
    hazards::{self, HazardSpec, report as hazard_report},
    isolation::{self, IsolationError, IsolationSpec, Scope, TargetSpec, report as proof_report},
};

use super::{CommandError, Format, Places, RunRoot};

/// What is verified.
#[derive(Subcommand)]
pub(super) enum Verify {
    /// Conformance with E2B: every feature with every SDK; exit code 0 only if all that must work does
    E2b(Conformance),
    /// What two sandboxes of one memory must not share; exit code 4 if they share it, 5 if a case could not be tried
    CloneHazards(Hazards),
    /// Whether a sandbox reaches what it must not; exit code 4 for a breach, 5 for what is not proved
    Isolation(Prover),
    /// The part of `isolation` that is about what a policy lets out
    Egress(Prover),
    /// What code that has taken a VMM over can do to the host; exit code 4 for a breach, 5 for what is not proved
    Confinement(Confinement),
    /// Stands still until standard input ends: a process of root's for attempts to reach
    #[command(hide = true)]
    RootProcess,
}

/// Of the conformance suite.
#[derive(Args)]
pub(super) struct Conformance {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// An endpoint; its key is E2B_API_KEY [default: a cube-api of the run's own]
    #[arg(long, value_name = "URL")]
    api_url: Option<String>,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// What is verified; `interpreter` needs the template code-interpreter-v1
    #[arg(long, value_enum, default_value_t = Area::Sandbox)]
    area: Area,
    /// Only this SDK, such as python-2.63.0; repeat for more
    #[arg(long = "sdk", value_name = "NAME")]
    sdks: Vec<String>,
    /// Only this feature; repeat for more
    #[arg(long = "feature", value_name = "NAME")]
    features: Vec<String>,
    /// SDKs at work at the same time
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Also write matrix.json, matrix.md and matrix.xml into this directory
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: MatrixFormat,
}

/// Of the suite of clone hazards.
#[derive(Args)]
pub(super) struct Hazards {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// An endpoint; its key is E2B_API_KEY [default: a cube-api of the run's own]
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// Its data plane, such as https://{port}-{id}.example.com [default: as the target]
    #[arg(long, value_name = "PATTERN", requires = "target")]
    sandbox_url: Option<String>,
    /// Template id or name
    #[arg(long, default_value = "code-interpreter-v1")]
    template: String,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Of the isolation prover.
#[derive(Args)]
pub(super) struct Prover {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// The probe that is put into sandboxes [default: cube-netprobe in $CUBE_BIN, else beside this program]
    #[arg(long, value_name = "PATH")]
    probe: Option<PathBuf>,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Only this case, or the cases of this class; repeat for more
    #[arg(long = "case", value_name = "NAME")]
    only: Vec<String>,
    /// A server that runs already; its key is E2B_API_KEY. What the guest alone can say is no pass
    /// [default: a cube-api of the run's own, in namespaces of its own]
    #[arg(long, value_name = "URL")]
    target: Option<String>,
    /// An address of this machine that packets of the target's sandboxes reach: the prover listens there
    #[arg(long, value_name = "ADDRESS", requires = "target")]
    outside: Option<IpAddr>,
    /// Also write isolation.json and isolation.xml into this directory
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Of the confinement prover.
#[derive(Args)]
pub(super) struct Confinement {
    #[command(flatten)]
    places: Places,
    #[command(flatten)]
    run_root: RunRoot,
    /// Template id or name
    #[arg(long, default_value = "base")]
    template: String,
    /// Only this case, or the cases of this class; repeat for more
    #[arg(long = "case", value_name = "NAME")]
    only: Vec<String>,
    /// Only VMMs that the harness starts, none of a server's
    #[arg(long)]
    direct: bool,
    /// Also write confinement.json and confinement.xml into this directory
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum MatrixFormat {
    /// For a terminal
    #[default]
    Human,
    /// One document, described in docs/conformance.md
    Json,
    /// For CI systems
    Junit,
    /// For issues and pages
    Markdown,
}

impl Verify {
    pub(super) fn carry_out(self) -> Result<End, CommandError> {
        match self {
            Self::E2b(conformance) => conformance.verify(),
            Self::CloneHazards(hazards) => hazards.verify(),
            Self::Isolation(prover) => prover.prove(Scope::Isolation),
            Self::Egress(prover) => prover.prove(Scope::Egress),
            Self::Confinement(prover) => prover.prove(),
            Self::RootProcess => Ok(stand_still()),
        }
    }
}

impl Places {
    fn programs(self) -> Programs {
        Programs {
            artifacts: self.artifacts.unwrap_or_else(artifacts::default_dir),
            vmm: self.vmm,
            api: self.api,
        }
    }
}

impl Conformance {
    fn verify(self) -> Result<End, CommandError> {
        let matrix = conformance::run(&VerifySpec {
            programs: self.places.programs(),
            api_url: self.api_url,
            run_root: self.run_root.run_root,
            template: self.template,
            area: self.area,
            sdks: self.sdks,
            features: self.features,
            jobs: self.jobs,
        })?;
        if let Some(dir) = &self.results {
            let path = dir.to_owned();
            write_matrix(dir, &matrix).map_err(|source| VerifyError::Io { path, source })?;
        }
        print!(
            "{}",
            match self.format {
                MatrixFormat::Human => matrix_report::terminal(&matrix),
                MatrixFormat::Json => matrix_report::json(&matrix),
                MatrixFormat::Junit => matrix_report::junit(&matrix),
                MatrixFormat::Markdown => matrix_report::markdown(&matrix),
            }
        );
        Ok(matrix.end())
    }
}

fn write_matrix(dir: &Path, matrix: &Matrix) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("matrix.json"), matrix_report::json(matrix))?;
    std::fs::write(dir.join("matrix.md"), matrix_report::markdown(matrix))?;
    std::fs::write(dir.join("matrix.xml"), matrix_report::junit(matrix))
}

impl Hazards {
    fn verify(self) -> Result<End, CommandError> {
        let findings = hazards::run(&HazardSpec {
            programs: self.places.programs(),
            target: self.target,
            sandbox_url: self.sandbox_url,
            run_root: self.run_root.run_root,
            template: self.template,
            mode: hazards::Mode::Look,
        })?;
        print!(
            "{}",
            match self.format {
                Format::Human => hazard_report::terminal(&findings),
                Format::Json => hazard_report::json(&findings),
                Format::Junit => hazard_report::junit(&findings),
            }
        );
        Ok(findings.end())
    }
}

impl Prover {
    fn prove(self, scope: Scope) -> Result<End, CommandError> {
        let target = match self.target {
            Some(url) => Some(TargetSpec {
                url,
                key: std::env::var("E2B_API_KEY").map_err(|_| VerifyError::NoKey)?,
                outside: self.outside,
            }),
            None => None,
        };
        let places = self.places.programs();
        let proof = isolation::run(&IsolationSpec {
            artifacts: places.artifacts,
            vmm: places.vmm,
            api: places.api,
            probe: self.probe,
            run_root: self.run_root.run_root,
            template: self.template,
            scope,
            only: self.only,
            target,
        })?;
        if let Some(dir) = self.results {
            let write = |name: &str, text: String| std::fs::write(dir.join(name), text);
            std::fs::create_dir_all(&dir)
                .and_then(|()| write("isolation.json", proof_report::json(&proof)))
                .and_then(|()| write("isolation.xml", proof_report::junit(&proof)))
                .map_err(|source| IsolationError::Io {
                    path: dir.clone(),
                    source,
                })?;
        }
        print!(
            "{}",
            match self.format {
                Format::Human => proof_report::terminal(&proof),
                Format::Json => proof_report::json(&proof),
                Format::Junit => proof_report::junit(&proof),
            }
        );
        Ok(proof.end())
    }
}

impl Confinement {
    fn prove(self) -> Result<End, CommandError> {
        let places = self.places.programs();
        let proof = confinement::run(&ConfinementSpec {
            artifacts: places.artifacts,
            vmm: places.vmm,
            api: places.api,
            run_root: self.run_root.run_root,
            template: self.template,
            starts: if self.direct {
                Starts::Direct
            } else {
                Starts::Both
            },
            only: self.only,
        })?;
        if let Some(dir) = self.results {
            let write = |name: &str, text: String| std::fs::write(dir.join(name), text);
            std::fs::create_dir_all(&dir)
                .and_then(|()| write("confinement.json", held_report::json(&proof)))
                .and_then(|()| write("confinement.xml", held_report::junit(&proof)))
                .map_err(|source| ConfinementError::Io {
                    path: dir.clone(),
                    source,
                })?;
        }
        print!(
            "{}",
            match self.format {
                Format::Human => held_report::terminal(&proof),
                Format::Json => held_report::json(&proof),
                Format::Junit => held_report::junit(&proof),
            }
        );
        Ok(proof.end())
    }
}

/// Says that it is there, and waits for the end of its input.
fn stand_still() -> End {
    let mut out = std::io::stdout();
    let said = out.write_all(b"\n").and_then(|()| out.flush());
    let waited = said.and_then(|()| std::io::stdin().read_to_end(&mut Vec::new()));
    match waited {
        Ok(_) => End::Pass,
        Err(_) => End::Bug,
    }
}
