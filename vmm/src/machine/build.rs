//! Builds the VM: boots from a kernel, or restores from a template.

use std::{fs::File, path::Path};

use kvm_ioctls::Kvm;
use model::{Platform, RestoreSpec, StartPhase, VmSpec, WorkingSetPrefault};
use vmm_control::{
    Reply, VmPhase,
    files::{FileRole, Files, TemplateFile},
};

use super::event_loop::Machine;
use super::vm::{Ancestry, KernelOrigin, Origin, Vm};
use crate::{
    devices::{self, BackendSpec, ConsoleLog, DeviceBus, LayerDiff},
    error::MachineError,
    memory::{self, Memory},
    platform::{PlatformVm, kernel_parameters, probe, ring3::BootFiles},
    snapshot::{self, Source, Template},
    sys,
};

/// Limit on the size of a console file in bytes.
const CONSOLE_BYTES: u64 = 1 << 20;
/// Kernel command line of every guest. The platform's and the specification's parameters follow it.
const CMDLINE: &str = "quiet panic=-1 mitigations=off init_on_alloc=0 init_on_free=0 rdinit=/init \
    random.trust_cpu=off";
/// Parameters that keep an idle guest from waking up: each wake-up costs the host a tenth of a millisecond, and
/// thousands of guests are idle. They turn off the watchdogs (clock source, lock-ups) and background compaction,
/// collect statistics twice a minute, and let RCU grace periods end at the first possible tick.
const QUIET: &str = "tsc=nowatchdog nowatchdog sysctl.vm.compaction_proactiveness=0 \
    sysctl.vm.stat_interval=30 rcutree.jiffies_till_first_fqs=0";

impl Machine {
    /// Runs `attempt`, which builds the VM. If it fails, its stamps on the timeline are discarded.
    pub(super) fn build(
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

    pub(super) fn boot(&mut self, spec: &VmSpec, mut files: Files) -> Result<Reply, MachineError> {
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

    pub(super) fn restore(
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
            // A probe would take longer than the whole restore.
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
}

/// Takes a file that must accompany the request. `path` is for the error message.
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
        Path::new("the scratch file for disk writes"),
    )
}

fn take_kvm(files: &mut Files) -> Result<Kvm, MachineError> {
    let file = take(files, FileRole::Kvm, Path::new("/dev/kvm"))?;
    sys::kvm(file).map_err(MachineError::NoKvm)
}

/// Duplicates the descriptor of a file of the whole template (see [`Template::whole`]).
fn copy(template: &Template, name: TemplateFile) -> Result<File, MachineError> {
    let file = template.whole().file(name)?;
    file.try_clone().map_err(MachineError::Descriptor)
}

/// The layer blocks of a diff.
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

/// The memory of a clone: the whole template's memory, with the pages of a diff over it.
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
    // A diff without its own working set uses the base's: its clones touch the same pages first.
    let list = template.own.optional(TemplateFile::WorkingSet);
    let list = list.or_else(|| template.whole().optional(TemplateFile::WorkingSet));
    memory.expect(memory::read_working_set(list, memory.bytes()), prefault);
    Ok(memory)
}
