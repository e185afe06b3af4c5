//! The owner of everything in this process: one VM, its devices, its control socket. One thread: between
//! two runs of the vCPU it serves whatever became ready, and while the guest is idle it waits here.
//!
//! ```text
//!          boot ───────────────► Running ◄──resume── Paused ◄── restore
//! Empty ──┤                        │  └────pause──────►│
//!          restore ─► Paused       └──guest ends──► Exited
//! ```
//! With a connected control socket the process ends when that is closed, whatever the state: nobody is left
//! to ask for it. With a listening one it ends when the guest does, or is told to (see `control`).

mod save;

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kvm_ioctls::Kvm;
use model::{
    FileSum, HypercallPath, Identity, Platform, RestoreSpec, StartPhase, Timeline, VmSpec,
    WorkingSetPrefault, clock,
};
use vmm_control::{
    Failure, FailureKind, Reply, Request, VmPhase, VmStats,
    files::{FileRole, Files, TemplateFile},
};

use crate::{
    agent::{AGENT_PORT, IdentityTask, Progress},
    control::{Control, Received},
    devices::{self, BackendSpec, ConsoleLog, DeviceBus, LayerDiff},
    error::MachineError,
    memory::{self, Memory},
    platform::{EndReason, Exit, PlatformVm, kernel_parameters, probe, ring3::BootFiles},
    snapshot::{self, Ancestor, Source, Template},
    sys,
    watch::{DeviceToken, Events, Token, Watch},
};

/// Most bytes a console file keeps.
const CONSOLE_BYTES: u64 = 1 << 20;
/// While an identity waits, the guest is left this often to look at the time.
const ALARM: Duration = Duration::from_millis(10);
/// What every guest boots with; the platform's and the spec's words come after.
const CMDLINE: &str = "quiet panic=-1 mitigations=off init_on_alloc=0 init_on_free=0 rdinit=/init \
    random.trust_cpu=off";
/// What keeps an idle guest asleep: each wake-up costs the host a tenth of a millisecond, and thousands of
/// guests are idle. No watchdogs (of clock source and lock-ups), no background compaction, statistics twice
/// a minute, and RCU grace periods that end in the tick in which they can.
const QUIET: &str = "tsc=nowatchdog nowatchdog sysctl.vm.compaction_proactiveness=0 \
    sysctl.vm.stat_interval=30 rcutree.jiffies_till_first_fqs=0";

/// What a snapshot's manifest says about where the VM came from.
#[derive(Debug)]
struct Origin {
    ram: u64,
    vcpus: u8,
    hypercalls: HypercallPath,
    root: PathBuf,
    root_sum: Option<FileSum>,
    kernel: KernelOrigin,
    /// What a diff is to be made against; a booted VM has none.
    ancestor: Option<Ancestry>,
}

/// The whole template that a clone descends from.
#[derive(Debug)]
struct Ancestry {
    template: Ancestor,
    memory: File,
}

#[derive(Debug)]
enum KernelOrigin {
    File(PathBuf, File),
    Sum(FileSum),
}

#[derive(Debug)]
struct Vm {
    platform: PlatformVm,
    bus: DeviceBus,
    console: Option<ConsoleLog>,
    origin: Origin,
    phase: VmPhase,
    end: Option<EndReason>,
    identity: Option<IdentityTask>,
}

/// See the module.
#[derive(Debug)]
pub struct Machine {
    watch: Watch,
    control: Control,
    vm: Option<Vm>,
    timeline: Timeline,
    exits: BTreeMap<&'static str, u64>,
    stop: bool,
}

impl Machine {
    /// A machine without a VM, served over `control`.
    ///
    /// # Errors
    /// No descriptors.
    pub fn new(mut control: Control, started_ns: u64) -> Result<Self, MachineError> {
        sys::install_kick().map_err(MachineError::Signals)?;
        let mut watch = Watch::new().map_err(MachineError::Watch)?;
        control.attach(&mut watch).map_err(MachineError::Watch)?;
        let mut timeline = Timeline::default();
        timeline.stamp(StartPhase::ProcessStarted, started_ns);
        timeline.stamp(StartPhase::Jailed, clock::monotonic_ns());
        Ok(Self {
            watch,
            control,
            vm: None,
            timeline,
            exits: BTreeMap::new(),
            stop: false,
        })
    }

    /// Serves until the control socket closes or says shutdown.
    ///
    /// # Errors
    /// The control socket or KVM broke in a way that no reply can carry; with a listening control socket,
    /// the end of the guest, for there may be no client to ask after it.
    pub fn serve(mut self) -> Result<(), MachineError> {
        let mut events = Events::default();
        while !self.stop {
            let wait = match self.running() {
                Some(vm) => {
                    let exit = vm.platform.run()?;
                    self.after(exit)?
                }
                None => Wait::For(None),
            };
            match wait {
                Wait::No => {}
                Wait::Poll => self.poll(&mut events, Some(Duration::ZERO)).map(|_| ())?,
                Wait::For(timeout) => self.idle(&mut events, timeout)?,
            }
        }
        Ok(())
    }

    fn running(&mut self) -> Option<&mut Vm> {
        self.vm.as_mut().filter(|vm| vm.phase == VmPhase::Running)
    }

    fn count(&mut self, name: &'static str) {
        *self.exits.entry(name).or_default() += 1;
    }

    /// Deals with an exit; says how to wait before the next run.
    fn after(&mut self, exit: Exit) -> Result<Wait, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(Wait::No);
        };
        match exit {
            Exit::DeviceWrite { offset, bytes, len } => {
                let ram = &vm.platform.memory().ram;
                let raised = vm.bus.write(offset, &bytes[..len], ram, &mut self.watch);
                vm.show_registers();
                vm.platform.raise(raised)?;
                self.count("device_write");
                Ok(Wait::No)
            }
            Exit::Resume => {
                vm.drain_console()?;
                vm.platform.clear_kick();
                self.count("resume");
                Ok(Wait::Poll)
            }
            Exit::Memory => {
                self.count("memory");
                Ok(Wait::No)
            }
            Exit::Idle(timeout) => {
                vm.drain_console()?;
                self.count("idle");
                Ok(Wait::For(timeout))
            }
            Exit::Ended(reason) => {
                vm.drain_console()?;
                vm.bus.hang_up(&mut self.watch);
                vm.phase = VmPhase::Exited;
                self.count("ended");
                self.fail_identity(FailureKind::GuestExited, &reason.to_string())?;
                if self.control.is_listening() {
                    return Err(MachineError::Exited(Some(reason)));
                }
                if let Some(vm) = &mut self.vm {
                    vm.end = Some(reason);
                }
                Ok(Wait::No)
            }
        }
    }

    /// Waits while the guest has nothing to run: until an interrupt is raised, its timer is due, or the
    /// VM no longer runs.
    fn idle(&mut self, events: &mut Events, timeout: Option<Duration>) -> Result<(), MachineError> {
        let guest_due = timeout.map(|t| Instant::now() + t);
        let idle_vm = self.running().is_some();
        loop {
            let task_due = self
                .vm
                .as_ref()
                .and_then(|vm| Some(vm.identity.as_ref()?.due()));
            let due = [guest_due, task_due].into_iter().flatten().min();
            let left = due.map(|at| at.saturating_duration_since(Instant::now()));
            let raised = self.poll(events, left)?;
            let over = guest_due.is_some_and(|at| Instant::now() >= at);
            if raised || over || self.stop || self.running().is_some() != idle_vm {
                return Ok(());
            }
        }
    }

    /// Serves what is ready, waiting for it if asked. True if the guest got an interrupt.
    fn poll(
        &mut self,
        events: &mut Events,
        timeout: Option<Duration>,
    ) -> Result<bool, MachineError> {
        self.watch
            .wait(events, timeout)
            .map_err(MachineError::Watch)?;
        let mut raised = false;
        for token in events.tokens() {
            match token {
                Token::ControlClient => self.request()?,
                Token::ControlListener => self
                    .control
                    .accept(&mut self.watch)
                    .map_err(MachineError::Watch)?,
                Token::Agent => {}
                Token::Device(token) => raised |= self.device_ready(token)?,
            }
        }
        raised |= self.step_identity()?;
        Ok(raised)
    }

    fn device_ready(&mut self, token: DeviceToken) -> Result<bool, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(false);
        };
        let raised = vm
            .bus
            .ready(token, &vm.platform.memory().ram, &mut self.watch);
        vm.show_registers();
        vm.platform.raise(raised)?;
        Ok(raised.0 != 0)
    }

    fn step_identity(&mut self) -> Result<bool, MachineError> {
        let Some(vm) = &mut self.vm else {
            return Ok(false);
        };
        let Some(task) = &mut vm.identity else {
            return Ok(false);
        };
        let (progress, stream) = task
            .step(Instant::now(), &mut self.watch)
            .map_err(MachineError::Watch)?;
        let mut raised = false;
        if let Some(stream) = stream {
            let ram = &vm.platform.memory().ram;
            let interrupts = vm
                .bus
                .connect_guest(AGENT_PORT, stream, ram, &mut self.watch);
            vm.platform.raise(interrupts)?;
            raised = interrupts.0 != 0;
        }
        match progress {
            Progress::Waiting => {}
            Progress::Ready => {
                vm.identity = None;
                sys::alarm(Duration::ZERO);
                self.timeline
                    .stamp(StartPhase::AgentReady, clock::monotonic_ns());
                self.reply(&Ok(Reply::Started(self.timeline.clone())))?;
            }
            Progress::Failed(why) => self.fail_identity(FailureKind::AgentUnready, &why)?,
        }
        Ok(raised)
    }

    fn fail_identity(&mut self, kind: FailureKind, why: &str) -> Result<(), MachineError> {
        let task = self.vm.as_mut().and_then(|vm| vm.identity.take());
        if task.is_none() {
            return Ok(());
        }
        sys::alarm(Duration::ZERO);
        self.reply(&Err(Failure {
            kind,
            message: why.to_owned(),
        }))
    }

    fn reply(&self, answer: &Result<Reply, Failure>) -> Result<(), MachineError> {
        self.control.reply(answer).map_err(MachineError::Control)
    }

    fn request(&mut self) -> Result<(), MachineError> {
        let received = self.control.receive(&mut self.watch);
        let (request, files) = match received.map_err(MachineError::Control)? {
            Received::Request(request, files) => (*request, files),
            Received::Left => {
                // Nobody waits for this answer any more.
                if let Some(vm) = self.vm.as_mut().filter(|vm| vm.identity.is_some()) {
                    vm.identity = None;
                    sys::alarm(Duration::ZERO);
                }
                return Ok(());
            }
            Received::End => {
                self.stop = true;
                return Ok(());
            }
        };
        let answer = match request {
            Request::Identity {
                identity,
                within_ms,
            } => match self.begin_identity(identity, within_ms) {
                Ok(()) => return Ok(()),
                Err(e) => Err(e),
            },
            other => self.act(other, files),
        };
        self.reply(&answer.map_err(|e| e.failure()))
    }

    fn act(&mut self, request: Request, mut files: Files) -> Result<Reply, MachineError> {
        match request {
            Request::Boot(spec) => self.build(|this| this.boot(&spec, files)),
            Request::Restore { spec, home } => self.build(|this| this.restore(&spec, &home, files)),
            Request::Pause => self.set_phase(VmPhase::Paused),
            Request::Resume => self.set_phase(VmPhase::Running),
            Request::Snapshot { content } => self.snapshot(content, &mut files),
            Request::SaveLayer => self.save_layer(&mut files),
            Request::RecordWorkingSet => self.record_working_set(&mut files),
            Request::Stats => Ok(Reply::Stats(self.stats())),
            Request::Shutdown => {
                self.stop = true;
                Ok(Reply::Done)
            }
            Request::Identity { .. } => Err(MachineError::WrongPhase("identity is handled apart")),
        }
    }

    fn need_vm(&mut self) -> Result<&mut Vm, MachineError> {
        self.vm
            .as_mut()
            .ok_or(MachineError::WrongPhase("there is no VM yet"))
    }

    fn need_empty(&self) -> Result<(), MachineError> {
        match self.vm {
            None => Ok(()),
            Some(_) => Err(MachineError::WrongPhase("this process has its VM already")),
        }
    }

    /// Builds the VM; a refused attempt leaves no stamps behind.
    fn build(
        &mut self,
        attempt: impl FnOnce(&mut Self) -> Result<Reply, MachineError>,
    ) -> Result<Reply, MachineError> {
        let before = self.timeline.clone();
        let built = attempt(self);
        if built.is_err() {
            self.timeline = before;
        }
        built
    }

    fn boot(&mut self, spec: &VmSpec, mut files: Files) -> Result<Reply, MachineError> {
        self.need_empty()?;
        let kvm = take_kvm(&mut files)?;
        let host = probe::platform(&kvm)?;
        spec.check(host)?;
        let ram = spec.memory.0;
        let backends = BackendSpec {
            root: take(&mut files, FileRole::Root, &spec.guest.root)?,
            layer_base: take(&mut files, FileRole::Layer, &spec.guest.layer)?,
            layer_diff: None,
            tap: files.take(FileRole::Tap),
            vsock: take(&mut files, FileRole::Vsock, &spec.vsock)?.into(),
            scratch: take_scratch(&mut files)?,
            layer_limit: spec.layer_limit.map(|limit| limit.0),
        };
        let mut bus = DeviceBus::new(backends, &mut self.watch)?;
        let cmdline = format!(
            "{CMDLINE} {QUIET} {} {}",
            kernel_parameters(host, ram, bus.count()),
            spec.cmdline
        );
        let mut kernel = take(&mut files, FileRole::Kernel, &spec.guest.kernel)?;
        let boot_files = BootFiles {
            kernel: &mut kernel,
            initrd: &mut take(&mut files, FileRole::Initrd, &spec.guest.initrd)?,
            cmdline: &cmdline,
            hypercalls: spec.hypercalls,
        };
        let size = (ram, spec.vcpus);
        let platform = PlatformVm::boot(host, &kvm, size, bus.count(), boot_files)?;
        bus.take_page_changed();
        self.stamp(StartPhase::MemoryMapped);
        let origin = Origin {
            ram,
            vcpus: spec.vcpus,
            hypercalls: spec.hypercalls,
            root: spec.guest.root.clone(),
            root_sum: None,
            kernel: KernelOrigin::File(spec.guest.kernel.clone(), kernel),
            ancestor: None,
        };
        self.install(platform, bus, files, origin)?;
        self.set_phase(VmPhase::Running)?;
        Ok(Reply::Started(self.timeline.clone()))
    }

    fn restore(
        &mut self,
        spec: &RestoreSpec,
        home: &Path,
        mut files: Files,
    ) -> Result<Reply, MachineError> {
        self.need_empty()?;
        let kvm = take_kvm(&mut files)?;
        let source = Source {
            dir: &spec.template,
            base: spec.base.as_deref(),
            home,
        };
        let mut template = snapshot::open(&source, &mut files, |found| match found {
            // A probe costs a clone more than its whole restore.
            Platform::Ring3 => Ok(Platform::Ring3),
            Platform::Hvm if probe::announces_virtualization() => Ok(Platform::Hvm),
            Platform::Hvm => probe::platform(&kvm),
        })?;
        let memory = clone_memory(&mut template, spec.prefault)?;
        let state = &template.state;
        let mut platform = PlatformVm::restore(&kvm, memory, devices::SLOTS, &state.platform)?;
        self.stamp(StartPhase::MemoryMapped);
        let backends = BackendSpec {
            root: template
                .root_image
                .try_clone()
                .map_err(MachineError::Descriptor)?,
            layer_base: copy(&template, TemplateFile::Layer)?,
            layer_diff: layer_diff(&mut template)?,
            tap: files.take(FileRole::Tap),
            vsock: take(&mut files, FileRole::Vsock, &spec.vsock)?.into(),
            scratch: take_scratch(&mut files)?,
            layer_limit: spec.layer_limit.map(|limit| limit.0),
        };
        let ram = &platform.memory().ram;
        let (bus, raised) =
            DeviceBus::restore(backends, &template.state.bus, ram, &mut self.watch)?;
        platform.raise(raised)?;
        let manifest = &template.manifest;
        let origin = Origin {
            ram: manifest.memory.0,
            vcpus: manifest.vcpus,
            hypercalls: manifest.hypercalls.unwrap_or_default(),
            root: manifest.root.clone(),
            root_sum: Some(manifest.root_sum.clone()),
            kernel: KernelOrigin::Sum(manifest.kernel_sum.clone()),
            ancestor: Some(Ancestry {
                memory: copy(&template, TemplateFile::Memory)?,
                template: template.root,
            }),
        };
        self.install(platform, bus, files, origin)?;
        Ok(Reply::Started(self.timeline.clone()))
    }

    fn install(
        &mut self,
        mut platform: PlatformVm,
        bus: DeviceBus,
        mut files: Files,
        origin: Origin,
    ) -> Result<(), MachineError> {
        let console = files.take(FileRole::Console);
        let console = console
            .map(|file| ConsoleLog::new(file.into(), CONSOLE_BYTES))
            .transpose()
            .map_err(MachineError::Descriptor)?;
        platform.show_registers(bus.registers());
        sys::aim_kick(platform.vcpu());
        self.stamp(StartPhase::DevicesReady);
        self.vm = Some(Vm {
            platform,
            bus,
            console,
            origin,
            phase: VmPhase::Paused,
            end: None,
            identity: None,
        });
        Ok(())
    }

    fn stamp(&mut self, phase: StartPhase) {
        self.timeline.stamp(phase, clock::monotonic_ns());
    }

    fn set_phase(&mut self, to: VmPhase) -> Result<Reply, MachineError> {
        let vm = self.need_vm()?;
        if vm.phase == VmPhase::Exited {
            return Err(MachineError::Exited(vm.end.clone()));
        }
        match (vm.phase, to) {
            (VmPhase::Running, VmPhase::Paused) => vm.platform.pause()?,
            (VmPhase::Paused, VmPhase::Running) => vm.platform.resume()?,
            _ => {}
        }
        vm.phase = to;
        if to == VmPhase::Running && self.timeline.at(StartPhase::Resumed).is_none() {
            self.stamp(StartPhase::Resumed);
        }
        Ok(Reply::Done)
    }

    fn begin_identity(&mut self, identity: Identity, within_ms: u64) -> Result<(), MachineError> {
        let vm = self.need_vm()?;
        match vm.phase {
            VmPhase::Running if vm.identity.is_none() => {}
            VmPhase::Exited => return Err(MachineError::Exited(vm.end.clone())),
            _ => return Err(MachineError::WrongPhase("the VM does not run")),
        }
        let within = Duration::from_millis(within_ms.min(3_600_000));
        vm.identity = Some(IdentityTask::new(identity, within, Instant::now()));
        sys::alarm(ALARM);
        Ok(())
    }

    fn stats(&self) -> VmStats {
        let vm = self.vm.as_ref();
        VmStats {
            phase: vm.map_or(VmPhase::Empty, |vm| vm.phase),
            exit_reason: vm.and_then(|vm| Some(vm.end.as_ref()?.to_string())),
            timeline: self.timeline.clone(),
            exits: self
                .exits
                .iter()
                .map(|(k, v)| ((*k).to_owned(), *v))
                .collect(),
            guest_private_bytes: vm
                .and_then(|vm| vm.platform.memory().private_ranges().ok())
                .map(|ranges| ranges.iter().map(|(_, n)| n).sum()),
            lost_frames: vm.map(|vm| vm.bus.lost_frames()).unwrap_or_default(),
            unknown_events: self.watch.unknown_events(),
        }
    }
}

impl Vm {
    fn show_registers(&mut self) {
        if self.bus.take_page_changed() {
            self.platform.show_registers(self.bus.registers());
        }
    }

    fn drain_console(&mut self) -> Result<(), MachineError> {
        let bytes = self.platform.take_log()?;
        if let Some(console) = &mut self.console
            && !bytes.is_empty()
        {
            console.write(&bytes);
        }
        Ok(())
    }
}

enum Wait {
    No,
    Poll,
    For(Option<Duration>),
}

/// A file that must have come with the request; `path` is for messages.
fn take(files: &mut Files, role: FileRole, path: &Path) -> Result<File, MachineError> {
    let missing = || MachineError::Open {
        path: path.to_owned(),
        source: snapshot::not_there(),
    };
    files.take(role).map(File::from).ok_or_else(missing)
}

fn take_scratch(files: &mut Files) -> Result<File, MachineError> {
    take(
        files,
        FileRole::Scratch,
        Path::new("the file for disk writes"),
    )
}

fn take_kvm(files: &mut Files) -> Result<Kvm, MachineError> {
    let file = take(files, FileRole::Kvm, Path::new("/dev/kvm"))?;
    sys::kvm(file).map_err(MachineError::NoKvm)
}

/// A descriptor of a file of the whole template.
fn copy(template: &Template, name: TemplateFile) -> Result<File, MachineError> {
    let file = template.whole().file(name)?;
    file.try_clone().map_err(MachineError::Descriptor)
}

/// What a diff has of the layer.
fn layer_diff(template: &mut Template) -> Result<Option<LayerDiff>, MachineError> {
    let Some(diff) = &mut template.diff else {
        return Ok(None);
    };
    let file = template.own.file(TemplateFile::Layer)?.try_clone();
    Ok(Some(LayerDiff {
        file: file.map_err(MachineError::Descriptor)?,
        extents: std::mem::take(&mut diff.layer),
    }))
}

/// The memory of a clone: the whole template's, and over it what a diff has.
fn clone_memory(
    template: &mut Template,
    prefault: WorkingSetPrefault,
) -> Result<Memory, MachineError> {
    let base = copy(template, TemplateFile::Memory)?;
    let mut memory = Memory::private_copy(
        base,
        template.root.memory_bytes,
        template.state.platform.hole(),
    )?;
    if let Some(diff) = &mut template.diff {
        let own = template.own.file(TemplateFile::Memory)?;
        let laid = memory.lay_over(own, std::mem::take(&mut diff.memory));
        laid.map_err(snapshot::at(
            "read",
            &template.own.path(TemplateFile::Memory),
        ))?;
    }
    // What the base's clones need at once, a clone of its diff needs too.
    let list = template.own.optional(TemplateFile::WorkingSet);
    let list = list.or_else(|| template.whole().optional(TemplateFile::WorkingSet));
    memory.expect(memory::read_working_set(list, memory.bytes()), prefault);
    Ok(memory)
}
