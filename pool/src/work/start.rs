//! Making a VM: for the warm stock, for a lease that cannot wait, for a sandbox that was paused.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use api_types::envd::{EnvdClient, ExecRequest};
use model::{
    Bytes, EntropySeed, GuestPaths, HypercallPath, Identity, RestoreSpec, SandboxId, StartPhase,
    Timeline, VmSpec, WarmUpRequest, WorkingSetPrefault,
};
use netisolation::{Isolation, Tap};
use vmm_control::{ControlClient, VmUser, template::LoadedTemplate};

use super::{
    Card, Who, WorkError, connect, connect_agent, init_request, save::ForkSnapshot,
    wall_clock::may_be_late,
};
use crate::{
    cgroup::Groups,
    host,
    record::{BootFiles, Durability, Kept, ProcessName, Record, SlotDir},
    vm::Vm,
};

/// What a warm guest has run before it waits: a process start, whose pages are then its own and whose page
/// table entries are in place.
const WARM_UP: &str = "/bin/true";
/// The header of what the template's servers are asked.
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
/// A VMM that is told to die has gone after this.
const END: Duration = Duration::from_secs(10);

/// What it starts from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The snapshot of a template, a fork or a paused sandbox; and the template in huge pages that it is to be
    /// laid over, if it is a diff and that is loaded.
    Snapshot(PathBuf, Option<Arc<LoadedTemplate>>),
    /// The snapshot that a sandbox's forks have in common, laid over its base in the same way.
    Fork(Arc<ForkSnapshot>, Option<Arc<LoadedTemplate>>),
    /// A template whose memory is in huge pages, which are there as long as this is.
    Loaded(Arc<LoadedTemplate>),
    /// The disk alone.
    Boot {
        files: BootFiles,
        layer: PathBuf,
        memory: model::Bytes,
        vcpus: u8,
    },
}

/// What the VM is for.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    /// To wait for a lease, after its servers were asked this.
    Wait { warm_up: Arc<[WarmUpRequest]> },
    /// A lease: the note and the settings in the record are its own.
    Lease,
    /// A sandbox that goes on.
    GoOn,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct StartPlan {
    pub(crate) vmm: PathBuf,
    pub(crate) id: SandboxId,
    pub(crate) dir: SlotDir,
    pub(crate) source: Source,
    pub(crate) purpose: Purpose,
    pub(crate) who: Who,
    /// As it is to be while the VM is being made; its process is added.
    pub(crate) record: Record,
    /// Guest RAM.
    pub(crate) ram: u64,
    /// Most that its layer may take of the host's disk.
    pub(crate) layer_limit: Option<Bytes>,
    pub(crate) groups: Arc<Groups>,
    pub(crate) network: Option<Isolation>,
    pub(crate) timeout: Duration,
    pub(crate) timeline: Timeline,
}

/// A VM that was made.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) vm: Vm,
    pub(crate) record: Record,
    pub(crate) timeline: Timeline,
    pub(crate) up: Up,
    /// Bytes that are its own already.
    pub(crate) private: Option<u64>,
}

/// A VM whose agent has answered.
#[derive(Debug)]
pub(crate) struct Up {
    pub(crate) control: UnixStream,
    pub(crate) agent: UnixStream,
    /// Whether the time has to be told again: see [`super::wall_clock`].
    pub(crate) clock_may_be_late: bool,
}

impl StartPlan {
    /// Makes the VM.
    ///
    /// # Errors
    /// See [`WorkError`]; there is no process then. The directory stays.
    pub(crate) fn run(mut self) -> Result<Started, WorkError> {
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
                let _nobodys = crate::network::release(self.network.as_ref(), tap, vmm);
                Err(e)
            }
        }
    }

    fn start(&mut self, tap: Option<Tap>) -> Result<(Vm, Up), WorkError> {
        let vm = self.spawn()?;
        match self.bring_up(&vm, tap) {
            Ok(up) => Ok((vm, up)),
            Err(e) => {
                // It cannot be helped if even that fails; the next server finds it in the record.
                let _ = vm.end(END);
                Err(e)
            }
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
        self.groups.create(&self.id, self.ram)
    }

    fn spawn(&mut self) -> Result<Vm, WorkError> {
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.dir.stderr())
            .map_err(|e| WorkError::Io("create the VMM's log", e))?;
        let user = VmUser::new(self.record.user.unwrap_or(VmUser::POOL.start));
        let child = vmm_control::spawn_detached(&self.vmm, &self.dir.control(), log, user)
            .map_err(|e| WorkError::Control("start the VMM", e))?;
        let vm = Vm::of_child(child).map_err(|(e, mut child)| {
            let _ = child.kill();
            let _ = child.wait();
            WorkError::Io("watch the VMM", e)
        })?;
        // Its memory has to be counted in its group from the first page on, and it has to be in the record
        // before it runs a guest.
        let known = self.groups.enter(&self.id, vm.name.pid).and_then(|()| {
            // When memory is short all the same, a sandbox goes before anything else.
            fs::write(format!("/proc/{}/oom_score_adj", vm.name.pid), "500")?;
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

    fn bring_up(&mut self, vm: &Vm, tap: Option<Tap>) -> Result<Up, WorkError> {
        let stream = vmm_control::connect(&self.dir.control(), Some(self.timeout))
            .map_err(|e| WorkError::Io("connect to the VMM", e))?;
        let copy = |e| WorkError::Io("copy a descriptor", e);
        let mut control = ControlClient::new(stream.try_clone().map_err(copy)?, Some(self.timeout))
            .map_err(copy)?;
        self.build(&mut control, tap)?;
        self.record.lineage = control.lineage().cloned();
        let asked = Instant::now();
        let mut client = connect_agent(&self.dir.vsock(), self.timeout)?;
        // Its greeting and its first answer together: no agent holds a place for starts longer.
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
            }
            Purpose::Lease | Purpose::GoOn => self.keep(vm.name)?,
        }
        let agent = client.into_stream();
        Ok(Up {
            control: stream,
            agent: agent.map_err(|e| WorkError::Agent("ask the guest agent", e))?,
            clock_may_be_late,
        })
    }

    /// Tells the guest who it is and what time it is. Whether its clock may be late all the same.
    fn identify(&self, client: &mut EnvdClient) -> Result<bool, WorkError> {
        let sent_ns = host::monotonic_ns();
        let card = Card::of(self.record.tap.as_ref());
        let init = init_request(&self.who, &self.record.init, card)
            .map_err(|e| WorkError::Io("draw random bytes", e))?;
        client
            .init(&init)
            .map_err(|e| WorkError::Agent("give the guest its identity", e))?;
        let late = may_be_late(sent_ns, host::monotonic_ns());
        Ok(match self.purpose {
            // The lease will tell the time.
            Purpose::Wait { .. } => false,
            Purpose::Lease | Purpose::GoOn => late,
        })
    }

    /// Has the pages of what users ask first in place: what the template says, or a command if it says nothing.
    fn warm_up(&self, requests: &[WarmUpRequest], agent: &mut EnvdClient) -> Result<(), WorkError> {
        if requests.is_empty() {
            return self.warm_up_by_command(agent);
        }
        let failed = |e| WorkError::Agent("ask a server of the guest for the first time", e);
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
            ..ExecRequest::new(WARM_UP, &[])
        };
        agent
            .exec(&request, self.timeout)
            .map(drop)
            .map_err(|e| WorkError::Agent("run a first command", e))
    }

    /// Has the VMM build the VM and run it. The TAP is the VMM's from here on: ours is closed.
    fn build(&mut self, control: &mut ControlClient, tap: Option<Tap>) -> Result<(), WorkError> {
        match self.source.clone() {
            Source::Snapshot(template, base) => {
                let base = base.as_ref().map(|base| base.dir());
                self.restore(control, template, base, tap)
            }
            Source::Fork(snapshot, base) => {
                let base = base.as_ref().map(|base| base.dir());
                self.restore(control, snapshot.dir().to_owned(), base, tap)
            }
            Source::Loaded(template) => self.restore(control, template.dir(), None, tap),
            Source::Boot { .. } => self.boot(control, tap),
        }
    }

    /// What the sandbox may reach is in force and was read back before its guest runs. A VM that waits has a TAP
    /// that lets nothing pass, until its lease.
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

    /// Takes over what the VMM has stamped.
    fn stamp_all(&mut self, stamps: &Timeline) {
        for (phase, at) in stamps.iter().filter(|(p, _)| *p != StartPhase::AgentReady) {
            self.timeline.stamp(phase, at);
        }
    }

    fn restore(
        &mut self,
        control: &mut ControlClient,
        template: PathBuf,
        base: Option<PathBuf>,
        tap: Option<Tap>,
    ) -> Result<(), WorkError> {
        let spec = RestoreSpec {
            template,
            base,
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

    /// Boots, and waits for the agent, which takes a first identity from the VMM.
    fn boot(&mut self, control: &mut ControlClient, tap: Option<Tap>) -> Result<(), WorkError> {
        let Source::Boot {
            files,
            layer,
            memory,
            vcpus,
        } = &self.source
        else {
            return Err(WorkError::Image("there is nothing to boot from".into()));
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
        let entropy = host::random().map_err(|e| WorkError::Io("draw random bytes", e))?;
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

    /// From here on the sandbox is a caller's.
    fn keep(&mut self, name: ProcessName) -> Result<(), WorkError> {
        let failed = |e| WorkError::Io("write the sandbox's record", e);
        self.record.vmm = Some(name);
        self.record.kept = Kept::Running;
        self.dir
            .write(&self.record, Durability::Process)
            .map_err(failed)?;
        // The VM holds the files that it was restored from by itself.
        match fs::remove_dir_all(self.dir.pause()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(e)),
            _ => Ok(()),
        }
    }
}
