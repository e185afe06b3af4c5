//! Starting clones and forks, running cells in them, and ending them.

use std::{
    fmt,
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use envd::EnvdClient;
use model::{RestoreSpec, WorkingSetPrefault};
use nix::sys::resource::{UsageWho, getrusage};
use vmm_control::{VmProcess, fresh_identity, template::LoadedTemplate};

use crate::{
    cost::{Cost, Counters, Stage},
    trace::Trace,
};

/// The interpreter's vsock port.
const PORT: u16 = 49_999;
/// Time limit of a single response.
const PATIENCE: Duration = Duration::from_secs(60);
/// The cell that parents of forks have run.
const PARENTS_CELL: &str = "1+1";

/// The origin of a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A clone of the template.
    Template,
    /// A fork of a clone that has run a cell.
    Fork,
}

impl Source {
    pub(crate) const ALL: [Self; 2] = [Self::Template, Self::Fork];
}

impl fmt::Display for Source {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Self::Template => "clone",
            Self::Fork => "fork",
        })
    }
}

/// A template in memory, and the snapshot for forks.
pub(crate) struct Parent {
    vmm: PathBuf,
    template: LoadedTemplate,
    run: tempfile::TempDir,
    /// The measured cell.
    cell: String,
}

impl Parent {
    /// Loads the template, and snapshots a clone that has run a cell.
    pub(crate) fn start(vmm: &Path, template: &Path, cell: &str) -> Result<Self> {
        let this = Self {
            vmm: vmm.to_owned(),
            template: LoadedTemplate::load(template)?,
            run: tempfile::Builder::new().prefix("first-cell-").tempdir()?,
            cell: cell.to_owned(),
        };
        let mut parent = this.clone_of(Source::Template, None)?;
        run_cell(&mut this.connect()?, PARENTS_CELL)?;
        parent.control.snapshot_diff(&this.fork())?;
        parent.kill()?;
        Ok(this)
    }

    fn fork(&self) -> PathBuf {
        self.run.path().join("fork")
    }

    fn connect(&self) -> Result<EnvdClient> {
        EnvdClient::connect(&self.run.path().join("vsock"), PORT, PATIENCE)
            .context("the interpreter does not listen")
    }

    fn clone_of(&self, source: Source, trace: Option<&Trace>) -> Result<VmProcess> {
        let log = File::create(self.run.path().join("stderr"))?;
        let mut vm = VmProcess::spawn(&self.vmm, Some(log), Some(PATIENCE))?;
        if let Some(trace) = trace {
            trace.follow(vm.pid())?;
        }
        let vsock = self.run.path().join("vsock");
        // The previous clone was killed and may have left its socket.
        let _ = std::fs::remove_file(&vsock);
        let (template, base) = match source {
            Source::Template => (self.template.dir(), None),
            Source::Fork => (self.fork(), Some(self.template.dir())),
        };
        let spec = RestoreSpec {
            template,
            base,
            root: None,
            vsock,
            console: None,
            layer_limit: None,
            prefault: WorkingSetPrefault::On,
        };
        vm.control.restore(spec, None)?;
        vm.control.resume()?;
        vm.control.identity(fresh_identity("clone")?, PATIENCE)?;
        Ok(vm)
    }

    /// Runs one clone. Returns the cost of each stage; tracing increases it.
    pub(crate) fn one_life(
        &self,
        source: Source,
        trace: Option<&Trace>,
    ) -> Result<Vec<(Stage, Cost)>> {
        let children = children_cpu_ns()?;
        let mut meter = Meter {
            from: Counters::zero(),
            trace,
            stages: Vec::new(),
        };
        let mut vm = self.clone_of(source, trace)?;
        meter.note(Stage::Start, &mut vm)?;
        let mut client = self.connect()?;
        run_cell(&mut client, &self.cell)?;
        meter.note(Stage::First, &mut vm)?;
        run_cell(&mut client, &self.cell)?;
        meter.note(Stage::Second, &mut vm)?;
        let before = Counters::read(vm.pid())?;
        let killed = Counters::zero();
        vm.kill()?;
        let mut end = killed.to(Counters::zero());
        end.cpu_ns = (children_cpu_ns()? - children).saturating_sub(before.cpu_ns);
        end.shadow = trace.map(Trace::take).transpose()?;
        meter.stages.push((Stage::End, end));
        Ok(meter.finish())
    }
}

/// Records stages, excluding the cost of recording.
struct Meter<'a> {
    from: Counters,
    trace: Option<&'a Trace>,
    stages: Vec<(Stage, Cost)>,
}

impl Meter<'_> {
    fn note(&mut self, stage: Stage, vm: &mut VmProcess) -> Result<()> {
        let mut cost = self.from.to(Counters::read(vm.pid())?);
        cost.shadow = self.trace.map(Trace::take).transpose()?;
        cost.own_pages = vm.control.stats()?.guest_private_bytes.map(|n| n >> 12);
        self.stages.push((stage, cost));
        self.from = Counters::read(vm.pid())?;
        Ok(())
    }

    /// Ends the record, adding the sum of a life with one cell.
    fn finish(mut self) -> Vec<(Stage, Cost)> {
        let mut life = Cost::default();
        for (stage, cost) in &self.stages {
            if matches!(stage, Stage::Start | Stage::First | Stage::End) {
                life.add(cost);
            }
        }
        self.stages.push((Stage::Life, life));
        self.stages
    }
}

/// CPU time of all reaped children.
fn children_cpu_ns() -> Result<u64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let ns = |time: nix::sys::time::TimeVal| {
        u64::try_from(time.tv_sec() * 1_000_000_000 + time.tv_usec() * 1000).unwrap_or(0)
    };
    Ok(ns(usage.user_time()) + ns(usage.system_time()))
}

fn run_cell(client: &mut EnvdClient, cell: &str) -> Result<()> {
    let request = serde_json::json!({ "code": cell }).to_string();
    let answer = client.request("POST", "/execute", &[], request.as_bytes())?;
    let text = String::from_utf8_lossy(&answer.body);
    let is_result = |line: &str| line.contains(r#""type":"result""#);
    ensure!(text.lines().any(is_result), "the cell gave {text}");
    Ok(())
}
