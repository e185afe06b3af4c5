//! Starts: making a VM for the warm stock, for a create without a warm slot, for a fork, or for a resume.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use envd::{EnvdClient, ExecRequest};
use library::{diff::Restorer, durable::Durability, images::BootFiles, vmms::Vmm};
use model::{
    Bytes, EntropySeed, GuestPaths, HypercallPath, Identity, RestoreSpec, SandboxId, StartPhase,
    Timeline, VmSpec, WarmUpRequest, WorkingSetPrefault,
};
use netisolation::{Isolation, Tap};
use vmm_control::{ControlClient, VmUser, files::Lineage, template::LoadedTemplate};

use super::{
    NewIdentity, WorkError, connect, connect_agent, init_request, read_ahead, save::ForkSnapshot,
    wall_clock::may_be_late,
};
use crate::{
    cgroup::Groups,
    clock::{Clock, Reading},
    host,
    record::{Kept, ProcessName, Record, SlotDir},
    sandbox::{CreateSpec, Priority},
    vm::{OOM_SCORE, Vm, set_oom_score},
};

/// Header of the warm-up requests.
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
/// How long a killed VMM may take to exit.
const END: Duration = Duration::from_secs(10);

/// A snapshot whose files have been located.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) dir: PathBuf,
    pub(crate) root: PathBuf,
    /// The directory of the base, if the snapshot is a diff.
    pub(crate) base: Option<PathBuf>,
    /// The base, if it is loaded into huge pages.
    pub(crate) loaded_base: Option<Arc<LoadedTemplate>>,
}

/// The files that a VM starts from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The snapshot of a template or of a paused sandbox.
    Snapshot(Image),
    /// The snapshot from which all forks of a request start. The reference keeps its files.
    Fork(Arc<ForkSnapshot>, Image),
    /// A template whose memory is loaded into huge pages, and its root image. The reference keeps the pages allocated.
    Loaded(Arc<LoadedTemplate>, PathBuf),
    /// Kernel, initramfs, root image and layer, for a cold boot.
    Boot {
        files: BootFiles,
        layer: PathBuf,
        memory: model::Bytes,
        vcpus: u8,
    },
}

impl Source {
    /// The memory that the VM maps from huge pages.
    pub(crate) fn loaded(&self) -> Option<Arc<LoadedTemplate>> {
        match self {
            Self::Loaded(template, _) => Some(Arc::clone(template)),
            Self::Snapshot(image) | Self::Fork(_, image) => image.loaded_base.clone(),
            Self::Boot { .. } => None,
        }
    }
}

/// The purpose of the new VM.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    /// It becomes a warm slot, after the warm-up requests have succeeded.
    Wait { warm_up: Arc<[WarmUpRequest]> },
    /// It becomes the sandbox of a create or fork, whose settings are in the record.
    Lease,
    /// It continues a paused sandbox.
    GoOn,
}

#[derive(Debug)]
pub(crate) struct StartPlan {
    pub(crate) vmm: Vmm,
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    pub(crate) source: Source,
    pub(crate) purpose: Purpose,
    pub(crate) identity: NewIdentity,
    /// The slot's record. The start adds process, TAP and lineage.
    pub(crate) record: Record,
    /// Guest RAM in bytes.
    pub(crate) ram: u64,
    /// Maximum space of the layer on the host's disk; `None`: the layer's size.
    pub(crate) layer_limit: Option<Bytes>,
    pub(crate) groups: Arc<Groups>,
    pub(crate) network: Option<Isolation>,
    /// [`crate::PoolConfig::ca_bundle`].
    pub(crate) authority: Option<Arc<str>>,
    pub(crate) timeout: Duration,
    pub(crate) timeline: Timeline,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) restorer: Restorer,
}

/// Whether the memory of a snapshot is read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadAhead {
    /// Yes: it has not been used recently, so it may not be in the page cache.
    Memory,
    Nothing,
}

/// A started VM.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) vm: Vm,
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) up: Up,
    /// Private memory in bytes; `None` if it cannot be read.
    pub(crate) private: Option<u64>,
}

/// Connections to a VM whose agent has responded.
#[derive(Debug)]
pub(crate) struct Up {
    pub(crate) control: UnixStream,
    pub(crate) agent: UnixStream,
    /// Whether the time must be sent again; see [`super::wall_clock`].
    pub(crate) clock_may_be_late: bool,
}

impl StartPlan {
    /// Turns the VM into the sandbox of a create or fork with these settings.
    pub(crate) fn lease(&mut self, spec: CreateSpec, clock: &Clock, timeline: Timeline) {
        self.purpose = Purpose::Lease;
        self.timeout = spec.priority.patience(self.timeout);
        self.timeline = timeline;
        self.record.take_settings(spec, clock);
    }

    /// Makes the VM.
    ///
    /// # Errors
    /// Returns any [`WorkError`]. The VMM process has then been killed and its TAP released or discarded. The slot's
    /// directory and cgroup remain.
    pub(crate) fn run(mut self) -> Result<Started, WorkError> {
        self.restore_memory()
            .map_err(|e| WorkError::Io("make the memory of the template", e))?;
        if let (ReadAhead::Memory, Source::Snapshot(image)) = (self.read_ahead, &self.source) {
            let base = image.base.clone().filter(|_| image.loaded_base.is_none());
            read_ahead::begin(
                [Some(image.dir.clone()), base]
                    .into_iter()
                    .flatten()
                    .collect(),
            );
        }
        self.prepare()
            .map_err(|e| WorkError::Io("prepare the sandbox's directory", e))?;
        let tap = self.network.as_ref().map(Isolation::take).transpose();
        let tap = tap.map_err(|e| WorkError::Network("make a TAP", e))?;
        self.record.tap = tap.as_ref().map(|tap| tap.index);
        match self.start(tap) {
            Ok((vm, up)) => {
                let private = host::private_bytes(vm.name.pid);
                Ok(Started {
                    vm,
                    record: self.record,
                    timeline: self.timeline,
                    up,
                    private,
                })
            }
            Err(e) => {
                let Record { tap, vmm, .. } = self.record;
                let _counters = crate::network::release(self.network.as_ref(), tap, vmm);
                Err(e)
            }
        }
    }

    fn start(&mut self, tap: Option<Tap>) -> Result<(Vm, Up), WorkError> {
        let vm = self.spawn()?;
        match self.bring_up(&vm, tap) {
            Ok(up) => Ok((vm, up)),
            Err(e) => {
                // If the VMM does not exit in time, the next server finds the process in the record.
                let _ = vm.end(END);
                Err(e)
            }
        }
    }

    /// Makes the memory files that the VM maps, if templates are stored as diffs.
    fn restore_memory(&self) -> io::Result<()> {
        let (Source::Snapshot(image) | Source::Fork(_, image)) = &self.source else {
            return Ok(());
        };
        self.restorer.restore(&image.dir)?;
        match &image.base {
            Some(base) if image.loaded_base.is_none() => self.restorer.restore(base),
            _ => Ok(()),
        }
    }

    fn prepare(&self) -> io::Result<()> {
        match self.purpose {
            Purpose::Wait { .. } | Purpose::Lease => self.dir.create()?,
            Purpose::GoOn => {}
        }
        for stale in [self.dir.control(), self.dir.vsock()] {
            match fs::remove_file(stale) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        let priority = match self.purpose {
            // Callers' commands have precedence.
            Purpose::Wait { .. } => Priority::Background,
            Purpose::Lease | Purpose::GoOn => self.record.priority,
        };
        self.groups.create(&self.id, self.ram, priority)
    }

    fn spawn(&mut self) -> Result<Vm, WorkError> {
        let program = self.vmm.program();
        let program = program.map_err(|e| WorkError::Io("use the VMM's program", e))?;
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.dir.stderr())
            .map_err(|e| WorkError::Io("create the VMM's log", e))?;
        let user = VmUser::new(self.record.user.unwrap_or(VmUser::POOL.start));
        let joined = if self.vmm.joins_groups() {
            self.groups.tasks(self.id.as_str())
        } else {
            Vec::new()
        };
        let child = vmm_control::spawn_detached(program, &self.dir.control(), log, user, &joined)
            .map_err(|e| WorkError::Control("start the VMM", e))?;
        let vm = Vm::of_child(child).map_err(|(e, mut child)| {
            let _ = child.kill();
            let _ = child.wait();
            WorkError::Io("watch the VMM", e)
        })?;
        // Before the VMM gets its first request, it must be in its cgroup, so that all guest memory is charged there,
        // and in the record. It joins its cgroups before it accepts a client.
        let known = self
            .groups
            .enter(self.id.as_str(), vm.name.pid, &joined)
            .and_then(|()| {
                // If the host runs out of memory despite the limits, the kernel prefers to kill a sandbox.
                set_oom_score(vm.name.pid, OOM_SCORE)?;
                self.record.vmm = Some(vm.name);
                self.dir.write(&self.record, Durability::Process)
            });
        match known {
            Ok(()) => Ok(vm),
            Err(e) => {
                let _ = vm.end(END);
                Err(WorkError::Io("confine the VMM", e))
            }
        }
    }

    /// The lineage for the record. The files of a pause and of forks are removed as soon as their VMs run, so they cannot
    /// be the base of a later snapshot.
    fn lineage(&self, control: &ControlClient) -> Option<Lineage> {
        let mut lineage = control.lineage().cloned()?;
        let own = match (&self.source, &self.purpose) {
            (Source::Fork(_, image), _) | (Source::Snapshot(image), Purpose::GoOn) => Some(image),
            _ => None,
        };
        if own.is_some_and(|image| image.base.is_none()) {
            lineage.home = None;
        }
        Some(lineage)
    }

    fn bring_up(&mut self, vm: &Vm, tap: Option<Tap>) -> Result<Up, WorkError> {
        let stream = vmm_control::connect(&self.dir.control(), Some(self.timeout))
            .map_err(|e| WorkError::Io("connect to the VMM", e))?;
        let copy = |e| WorkError::Io("copy a descriptor", e);
        let mut control = ControlClient::new(stream.try_clone().map_err(copy)?, Some(self.timeout))
            .map_err(copy)?;
        self.build(&mut control, tap)?;
        self.record.lineage = self.lineage(&control);
        let asked = Instant::now();
        let mut client = connect_agent(&self.dir.vsock(), self.timeout)?;
        // Greeting and first response share one timeout, so that an agent cannot hold a start place for twice as long.
        client.set_timeout(self.timeout.saturating_sub(asked.elapsed()));
        let clock_may_be_late = self.identify(&mut client)?;
        self.timeline
            .stamp(StartPhase::AgentReady, host::monotonic_ns());
        match &self.purpose {
            Purpose::Wait { warm_up } => {
                self.warm_up(warm_up, &mut client)?;
                control
                    .pause()
                    .map_err(|e| WorkError::Control("pause the VM", e))?;
                self.groups
                    .to_foreground(&self.id)
                    .map_err(|e| WorkError::Io("set the sandbox's CPU weight", e))?;
            }
            Purpose::Lease | Purpose::GoOn => {}
        }
        let agent = client
            .into_stream()
            .map_err(|e| WorkError::Agent("send a request to the guest agent", e))?;
        if let Purpose::Lease | Purpose::GoOn = &self.purpose {
            // Must be the last step that can fail, so that a sandbox is still paused on disk after a failure.
            self.keep(vm.name)?;
        }
        Ok(Up {
            control: stream,
            agent,
            clock_may_be_late,
        })
    }

    /// Gives the guest its identity and the time. Returns whether the guest's clock may be late and must be set again.
    fn identify(&self, client: &mut EnvdClient) -> Result<bool, WorkError> {
        let sent_ns = host::monotonic_ns();
        let init = init_request(&self.identity, &self.record, self.authority.as_deref())
            .map_err(|e| WorkError::Io("generate random bytes", e))?;
        client
            .init(&init)
            .map_err(|e| WorkError::Agent("give the guest its identity", e))?;
        let late = may_be_late(sent_ns, host::monotonic_ns());
        Ok(match self.purpose {
            // The lease of the warm slot will send the time again.
            Purpose::Wait { .. } => false,
            Purpose::Lease | Purpose::GoOn => late,
        })
    }

    /// Makes the guest do the work of a user's first request, so that the pages for it are already private to the VM.
    /// Sends the template's warm-up requests or, if it has none, runs [`template::SLOT_WARM_UP`], after which the pages
    /// that the start of a process writes are private to the VM and have page table entries.
    fn warm_up(&self, requests: &[WarmUpRequest], agent: &mut EnvdClient) -> Result<(), WorkError> {
        if requests.is_empty() {
            return self.warm_up_by_command(agent);
        }
        let failed = |e| WorkError::Agent("send a warm-up request to the guest", e);
        for request in requests {
            let mut server =
                connect(&self.dir.vsock(), request.port, self.timeout).map_err(failed)?;
            let answer = server
                .request("POST", &request.path, &JSON, request.body.as_bytes())
                .map_err(failed)?;
            if answer.status != 200 {
                let WarmUpRequest { port, path, .. } = request;
                let why = format!("POST {path} on port {port}: status {}", answer.status);
                return Err(WorkError::Answer(why));
            }
        }
        Ok(())
    }

    fn warm_up_by_command(&self, agent: &mut EnvdClient) -> Result<(), WorkError> {
        let request = ExecRequest {
            user: Some("root".to_owned()),
            ..ExecRequest::new(template::SLOT_WARM_UP, &[])
        };
        agent
            .exec(&request, self.timeout)
            .map(drop)
            .map_err(|e| WorkError::Agent("run a warm-up command", e))
    }

    /// Makes the VMM build the VM and run it. The VMM gets a copy of the TAP's descriptor, and this process closes its
    /// own.
    fn build(&mut self, control: &mut ControlClient, tap: Option<Tap>) -> Result<(), WorkError> {
        match self.source.clone() {
            Source::Snapshot(image) => self.restore(control, image, tap),
            Source::Fork(snapshot, image) => {
                let dir = snapshot.dir().to_owned();
                self.restore(control, Image { dir, ..image }, tap)
            }
            Source::Loaded(template, root) => {
                let image = Image {
                    dir: template.dir(),
                    root,
                    base: None,
                    loaded_base: None,
                };
                self.restore(control, image, tap)
            }
            Source::Boot { .. } => self.boot(control, tap),
        }
    }

    /// Applies the sandbox's network policy and reads it back. Must be called before the guest runs. Does nothing for a
    /// warm slot, whose TAP drops all traffic until its lease.
    fn confine(&mut self) -> Result<(), WorkError> {
        let (Some(network), Some(tap)) = (&self.network, self.record.tap) else {
            return Ok(());
        };
        match self.purpose {
            Purpose::Wait { .. } => return Ok(()),
            Purpose::Lease | Purpose::GoOn => {}
        }
        network
            .confine(tap, &self.id, &self.record.policy)
            .map_err(|e| WorkError::Network("confine the sandbox", e))?;
        self.timeline
            .stamp(StartPhase::Confined, host::monotonic_ns());
        Ok(())
    }

    /// Adds the VMM's stamps to the timeline, except `AgentReady`, which this process stamps itself.
    fn stamp_all(&mut self, stamps: &Timeline) {
        for (phase, at) in stamps.iter().filter(|(p, _)| *p != StartPhase::AgentReady) {
            self.timeline.stamp(phase, at);
        }
    }

    fn restore(
        &mut self,
        control: &mut ControlClient,
        image: Image,
        tap: Option<Tap>,
    ) -> Result<(), WorkError> {
        let loaded = image.loaded_base.as_ref().map(|base| base.dir());
        let spec = RestoreSpec {
            template: image.dir,
            base: loaded.or(image.base),
            root: Some(image.root),
            vsock: self.dir.vsock(),
            console: Some(self.dir.console()),
            layer_limit: self.layer_limit,
            prefault: WorkingSetPrefault::On,
        };
        let stamps = control
            .restore(spec, tap.as_ref().map(|tap| tap.fd.as_fd()))
            .map_err(|e| WorkError::Control("restore the VM", e))?;
        self.stamp_all(&stamps);
        self.confine()?;
        control
            .resume()
            .map_err(|e| WorkError::Control("resume the VM", e))?;
        self.timeline
            .stamp(StartPhase::Resumed, host::monotonic_ns());
        Ok(())
    }

    /// Boots the VM. Makes the VMM send an identity to the agent, and waits until the agent is ready.
    fn boot(&mut self, control: &mut ControlClient, tap: Option<Tap>) -> Result<(), WorkError> {
        let Source::Boot {
            files,
            layer,
            memory,
            vcpus,
        } = &self.source
        else {
            return Err(WorkError::Image(
                "the sandbox has no files to boot from".into(),
            ));
        };
        let spec = VmSpec {
            memory: *memory,
            vcpus: *vcpus,
            guest: GuestPaths {
                kernel: files.kernel.clone(),
                initrd: files.initrd.clone(),
                root: files.root.clone(),
                layer: layer.clone(),
            },
            cmdline: String::new(),
            hypercalls: HypercallPath::default(),
            vsock: self.dir.vsock(),
            console: Some(self.dir.console()),
            layer_limit: self.layer_limit,
        };
        self.confine()?;
        control
            .boot(spec, tap.as_ref().map(|tap| tap.fd.as_fd()))
            .map_err(|e| WorkError::Control("boot the VM", e))?;
        let entropy = host::random().map_err(|e| WorkError::Io("generate random bytes", e))?;
        let identity = Identity {
            hostname: self.id.as_str().to_owned(),
            machine_id: self.record.machine_id.clone(),
            entropy: EntropySeed::new(entropy),
        };
        let stamps = control
            .identity(identity, self.timeout)
            .map_err(|e| WorkError::Control("give the guest its identity", e))?;
        self.stamp_all(&stamps);
        Ok(())
    }

    /// Writes the record of a sandbox that has an owner. The files of the pause that it was resumed from remain until
    /// the driver has responded to the resume.
    fn keep(&mut self, name: ProcessName) -> Result<(), WorkError> {
        self.record.vmm = Some(name);
        self.record.kept = Kept::Running;
        if matches!(self.purpose, Purpose::GoOn) {
            // The record still has the time of the pause. If the server is killed before it records the new deadline,
            // the next server must not end the sandbox because of that time.
            let now = Reading::now();
            let mut lifetime = self.record.lifetime;
            lifetime.set(now.wall, lifetime.resume_timeout_s());
            lifetime.timeout_s = self.record.lifetime.timeout_s;
            self.record.set_lifetime(lifetime, now.offset_ms());
        }
        self.dir
            .write(&self.record, Durability::Process)
            .map_err(|e| WorkError::Io("write the sandbox's record", e))
    }
}
