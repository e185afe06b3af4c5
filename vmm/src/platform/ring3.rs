//! The `ring3` platform: the guest kernel runs at CPL 3 through its Xen PV entry, served by the monitor.
//!
//! Guest-physical memory is RAM, then the monitor's region (see `monitor::layout`); KVM knows all of it, or what
//! a clone has touched so far (`slots`). Above it is the register page of the devices, a read-only slot: reads never
//! leave the guest, writes do, except interrupt acknowledgements, which an ioeventfd swallows.

mod cpu;
mod domain;
pub(crate) mod elf;
mod gate;
mod image;
mod slots;
mod tables;
mod text;

use std::{fs::File, time::Duration};

use kvm_bindings::{kvm_cpuid_entry2, kvm_msi};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuExit, VcpuFd, VmFd};
use model::HypercallPath;
use monitor::layout::{
    self, Clock, DEVICE_PORT, EVENT_VECTOR, LOG_BYTES, Shared, end, offset, port,
};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use cpu::CpuState;
pub use domain::DomainError;
pub use elf::ElfError;

use self::slots::Slots;
use crate::{
    devices::{INTERRUPT_ACK, Interrupts, SLOT_STRIDE},
    memory::{Memory, MemoryError},
    platform::{EndReason, Exit},
    sys,
};

/// KVM slot of the register page.
const REGISTER_SLOT: u32 = 0;
/// First of the KVM slots of guest memory.
const MEMORY_SLOT: u32 = 1;
/// The step that a KVM without memory for it refuses.
const REGISTER: &str = "register guest memory";
/// Bytes of the longest instruction (Intel SDM 2, 2.3.11).
const LONGEST_INSTRUCTION: u64 = 15;

/// Bytes of the monitor's region for so much RAM.
fn region_bytes(ram: u64) -> u64 {
    const ALIGN: u64 = 2 << 20;
    let m2p = (ram >> 12) * 8;
    layout::offset::M2P + m2p.div_ceil(ALIGN) * ALIGN
}

/// Why the platform could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Ring3Error {
    /// KVM refused a step.
    #[error("KVM refused to {step}")]
    Kvm {
        /// What was tried.
        step: &'static str,
        /// The cause.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The kernel or the initrd.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// Guest memory could not be read or written where the platform keeps its own data.
    #[error("the monitor's memory is out of reach")]
    Region(#[source] vm_memory::GuestMemoryError),
    /// Which memory the guest has touched cannot be told.
    #[error("cannot tell which memory the guest has touched")]
    Touched(#[source] std::io::Error),
    /// An eventfd could not be made.
    #[error("cannot make an eventfd")]
    EventFd(#[source] std::io::Error),
    /// Saved state that no VM can have been in.
    #[error("the saved state is impossible: {0}")]
    State(&'static str),
}

fn kvm(step: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Ring3Error {
    move |source| Ring3Error::Kvm { step, source }
}

/// What a snapshot holds of this platform.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ring3State {
    ram: u64,
    cpu: CpuState,
    /// System time of the guest when it was stopped.
    ns: u64,
    /// System time at which it wants its timer.
    deadline_ns: Option<u64>,
    /// Whether it was stopped in an idle exit.
    idle: bool,
}

/// A VM of this platform.
#[derive(Debug)]
pub struct Ring3 {
    vm: VmFd,
    vcpu: VcpuFd,
    memory: Memory,
    slots: Slots,
    ram: u64,
    registers: MmapRegion<()>,
    _ack: EventFd,
    clock: Clock,
    /// System time of the guest at which it was paused, while it is.
    paused_ns: Option<u64>,
    idle: bool,
    cpuid: Vec<kvm_cpuid_entry2>,
}

/// What booting needs beside memory.
#[derive(Debug)]
pub struct BootFiles<'a> {
    /// The kernel, an uncompressed ELF file.
    pub kernel: &'a mut File,
    /// The initramfs.
    pub initrd: &'a mut File,
    /// The whole command line.
    pub cmdline: &'a str,
    /// How the kernel is to reach the monitor.
    pub hypercalls: HypercallPath,
}

impl Ring3 {
    /// Length of guest memory for so much RAM, the monitor's region included.
    #[must_use]
    pub fn memory_bytes(ram: u64) -> u64 {
        ram + region_bytes(ram)
    }

    /// Kernel parameters that tell the guest's module where the devices are.
    #[must_use]
    pub fn device_parameters(ram: u64, count: usize) -> String {
        format!(
            "cube_mmio.base={:#x} cube_mmio.stride={SLOT_STRIDE:#x} cube_mmio.count={count} cube_mmio.port={DEVICE_PORT}",
            Self::memory_bytes(ram)
        )
    }

    /// Builds a VM with `ram` bytes of RAM that will start the kernel.
    ///
    /// # Errors
    /// See [`Ring3Error`].
    pub fn boot(
        kvm_fd: &Kvm,
        ram: u64,
        devices: usize,
        files: BootFiles<'_>,
    ) -> Result<Self, Ring3Error> {
        let memory = Memory::anonymous(Self::memory_bytes(ram), None)?;
        let cpuid = cpu::guest_cpuid(kvm_fd)?;
        let entries = image::build(&memory.ram, ram, &cpuid).map_err(Ring3Error::Region)?;
        let start = domain::build(&memory.ram, ram, files, &entries)?;
        let all = [0; slots::WORDS];
        let mut this = Self::new(kvm_fd, memory, ram, devices, (cpuid, all))?;
        cpu::set_cpuid(&this.vcpu, &this.cpuid)?;
        cpu::start(&this.vcpu, &entries, &start)?;
        let now = sys::tsc();
        this.set_clock(now, 0)?;
        let mut shared = this.shared()?;
        shared.ram_pages = ram >> 12;
        shared.region = ram;
        shared.console_ring = start.console;
        shared.first_cr3 = start.cr3;
        this.put_shared(shared)?;
        Ok(this)
    }

    /// Builds a clone on the template's memory. The guest does not run yet.
    ///
    /// # Errors
    /// See [`Ring3Error`]; state that does not fit is [`Ring3Error::State`].
    pub fn restore(
        kvm_fd: &Kvm,
        memory: Memory,
        devices: usize,
        state: &Ring3State,
    ) -> Result<Self, Ring3Error> {
        if Self::memory_bytes(state.ram) != memory.bytes() {
            return Err(Ring3Error::State("memory size"));
        }
        let cpuid = state.cpu.cpuid().to_vec();
        let deferred = read_deferred(&memory, state.ram)?;
        let mut this = Self::new(kvm_fd, memory, state.ram, devices, (cpuid, deferred))?;
        state.cpu.apply(&this.vcpu)?;
        let mut shared = this.shared()?;
        shared.log_tail = shared.log_head;
        shared.deferred = u64::from(!this.slots.complete());
        this.put_shared(shared)?;
        this.idle = state.idle;
        this.continue_clock(state.ns, state.deadline_ns)?;
        Ok(this)
    }

    /// Has the guest's system time go on at `ns`, and its timer fire when it expects it.
    fn continue_clock(&mut self, ns: u64, deadline_ns: Option<u64>) -> Result<(), Ring3Error> {
        self.set_clock(sys::tsc(), ns)?;
        let mut shared = self.shared()?;
        shared.deadline_tsc = deadline_ns.map_or(0, |ns| self.clock.tsc_at(ns));
        self.put_shared(shared)?;
        if !self.idle {
            // The monitor looks at the clock at its next entry: make that now.
            self.interrupt()?;
        }
        Ok(())
    }

    /// Stops the clock.
    pub fn pause(&mut self) {
        self.paused_ns = Some(self.now_ns());
    }

    /// Has the clock go on.
    ///
    /// # Errors
    /// The shared page is out of reach, or KVM refuses the interrupt.
    pub fn resume(&mut self) -> Result<(), Ring3Error> {
        let Some(ns) = self.paused_ns.take() else {
            return Ok(());
        };
        let deadline_ns = self.deadline_ns()?;
        self.continue_clock(ns, deadline_ns)
    }

    /// System time of the guest.
    fn now_ns(&self) -> u64 {
        self.paused_ns
            .unwrap_or_else(|| self.clock.ns_at(sys::tsc()))
    }

    /// System time at which it wants its timer.
    fn deadline_ns(&self) -> Result<Option<u64>, Ring3Error> {
        let deadline = self.shared()?.deadline_tsc;
        Ok((deadline != 0).then(|| self.clock.ns_at(deadline)))
    }

    fn new(
        kvm_fd: &Kvm,
        memory: Memory,
        ram: u64,
        devices: usize,
        (cpuid, deferred): (Vec<kvm_cpuid_entry2>, [u64; slots::WORDS]),
    ) -> Result<Self, Ring3Error> {
        let vm = kvm_fd.create_vm().map_err(kvm("create a VM"))?;
        cpu::split_irqchip(&vm)?;
        let mut slots = Slots::new(memory.host(), memory.bytes(), MEMORY_SLOT);
        let region = (ram, region_bytes(ram));
        slots
            .begin(&vm, &deferred, memory.expected().chain([region]))
            .map_err(kvm(REGISTER))?;
        let registers = MmapRegion::new(4096).map_err(|source| MemoryError::Map {
            bytes: 4096,
            source,
        })?;
        let page = Self::memory_bytes(ram);
        sys::set_slot(
            &vm,
            REGISTER_SLOT,
            page,
            registers.as_ptr(),
            4096,
            kvm_bindings::KVM_MEM_READONLY,
        )
        .map_err(kvm("register the register page"))?;
        let ack = EventFd::new(EFD_NONBLOCK).map_err(Ring3Error::EventFd)?;
        for device in 0..devices as u64 {
            let at = IoEventAddress::Mmio(page + device * SLOT_STRIDE + INTERRUPT_ACK);
            vm.register_ioevent(&ack, &at, NoDatamatch)
                .map_err(kvm("register an ioeventfd"))?;
        }
        let vcpu = vm.create_vcpu(0).map_err(kvm("create a vCPU"))?;
        Ok(Self {
            vm,
            vcpu,
            memory,
            slots,
            ram,
            registers,
            _ack: ack,
            clock: Clock::default(),
            paused_ns: None,
            idle: false,
            cpuid,
        })
    }

    /// The vCPU, for the kick.
    pub fn vcpu(&mut self) -> &mut VcpuFd {
        &mut self.vcpu
    }

    /// Guest memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Replaces what the guest reads from the register page.
    pub fn show_registers(&self, page: &[u8; 4096]) {
        use vm_memory::VolatileMemory;
        // The mapping has exactly this length.
        if let Ok(slice) = self.registers.get_slice(0, page.len()) {
            slice.copy_from(&page[..]);
        }
    }

    /// Runs the guest until it leaves.
    ///
    /// # Errors
    /// The shared page is out of reach (a bug), or KVM refuses to run.
    pub fn run(&mut self) -> Result<Exit, Ring3Error> {
        self.idle = false;
        let page = Self::memory_bytes(self.ram);
        let exit = match self.vcpu.run() {
            Ok(VcpuExit::IoOut(at, _)) => At::Port(at),
            Ok(VcpuExit::MmioWrite(at, data)) if at >= page && at < page + 4096 => {
                let mut bytes = [0; 8];
                let len = data.len().min(8);
                bytes[..len].copy_from_slice(&data[..len]);
                return Ok(Exit::DeviceWrite {
                    offset: at - page,
                    bytes,
                    len,
                });
            }
            Ok(VcpuExit::MmioWrite(at, data)) if at < page => {
                touch(&self.vm, &mut self.slots, at)?;
                let written = self.memory.ram.write_slice(data, GuestAddress(at));
                return written.map(|()| Exit::Memory).map_err(Ring3Error::Region);
            }
            Ok(VcpuExit::MmioRead(at, data)) if at < page => {
                touch(&self.vm, &mut self.slots, at)?;
                let read = self.memory.ram.read_slice(data, GuestAddress(at));
                return read.map(|()| Exit::Memory).map_err(Ring3Error::Region);
            }
            // Nothing else is there: writes are lost, reads give ones.
            Ok(VcpuExit::MmioWrite(..) | VcpuExit::Intr) => return Ok(Exit::Resume),
            Ok(VcpuExit::MmioRead(_, data) | VcpuExit::IoIn(_, data)) => {
                data.fill(0xff);
                return Ok(Exit::Resume);
            }
            Ok(VcpuExit::InternalError) => self.emulation_failed()?,
            Ok(other) => At::Failed(format!("KVM stopped the guest: {other:?}")),
            Err(e) if [nix::libc::EINTR, nix::libc::EAGAIN].contains(&e.errno()) => {
                return Ok(Exit::Resume);
            }
            Err(e) => At::Failed(format!("KVM cannot run the guest: {e}")),
        };
        match exit {
            At::Port(port::IDLE) => {
                self.idle = true;
                self.idle_time()
            }
            At::Port(port::END) => self.ended(),
            At::Port(port::MEMORY) => self.undefined(),
            // port::LOG, and whatever hostile code writes elsewhere.
            At::Port(_) => Ok(Exit::Resume),
            At::Memory => Ok(Exit::Memory),
            At::Failed(why) => Ok(Exit::Ended(EndReason::Failed(why))),
        }
    }

    /// Clears the request to leave that a kick left behind.
    pub fn clear_kick(&mut self) {
        self.vcpu.set_kvm_immediate_exit(0);
    }

    fn idle_time(&self) -> Result<Exit, Ring3Error> {
        let shared = self.shared()?;
        if shared.woken != 0 || shared.pending != 0 {
            return Ok(Exit::Resume);
        }
        if shared.deadline_tsc == 0 {
            return Ok(Exit::Idle(None));
        }
        let now = sys::tsc();
        let left = self
            .clock
            .ns_at(shared.deadline_tsc)
            .saturating_sub(self.clock.ns_at(now));
        Ok(Exit::Idle(Some(Duration::from_nanos(left))))
    }

    /// The monitor met #UD.
    fn undefined(&mut self) -> Result<Exit, Ring3Error> {
        let mut shared = self.shared()?;
        self.reach(shared.undefined_at)?;
        shared.deferred = u64::from(!self.slots.complete());
        self.put_shared(shared)?;
        Ok(Exit::Memory)
    }

    /// KVM gave an instruction up: tries it again if KVM does not know all memory.
    fn emulation_failed(&mut self) -> Result<At, Ring3Error> {
        if self.slots.complete() {
            return Ok(At::Failed("KVM stopped the guest: InternalError".into()));
        }
        let registers = self.vcpu.get_regs().map_err(kvm("read registers"))?;
        self.reach(registers.rip)?;
        cpu::take_undefined(&self.vcpu)?;
        Ok(At::Memory)
    }

    /// Has KVM know the memory in which an instruction lies. If it knew that, the instruction may be one that KVM
    /// cannot emulate, and nothing tells what it touches: then KVM gets to know all.
    fn reach(&mut self, rip: u64) -> Result<(), Ring3Error> {
        let cr3 = self.cr3()?;
        let mut came = false;
        for at in [rip, rip.wrapping_add(LONGEST_INSTRUCTION - 1)] {
            if let Some(at) = tables::translate(&self.memory.ram, cr3, at) {
                came |= self.slots.one(&self.vm, at).map_err(kvm(REGISTER))?;
            }
        }
        if !came {
            self.slots.all(&self.vm).map_err(kvm(REGISTER))?;
        }
        Ok(())
    }

    fn cr3(&self) -> Result<u64, Ring3Error> {
        let registers = self.vcpu.get_sregs();
        Ok(registers.map_err(kvm("read special registers"))?.cr3)
    }

    fn ended(&self) -> Result<Exit, Ring3Error> {
        Ok(Exit::Ended(match self.shared()?.end_reason {
            end::POWEROFF => EndReason::PowerOff,
            end::REBOOT => EndReason::Reboot,
            end::MONITOR => EndReason::Failed("the monitor gave up (the console says why)".into()),
            _ => EndReason::Crash,
        }))
    }

    /// Raises device interrupts.
    ///
    /// # Errors
    /// The shared page is out of reach, or KVM refuses the interrupt.
    pub fn raise(&mut self, interrupts: Interrupts) -> Result<(), Ring3Error> {
        if interrupts.0 == 0 {
            return Ok(());
        }
        let at = GuestAddress(self.ram + offset::SHARED);
        let pending: u64 = self.memory.ram.read_obj(at).map_err(Ring3Error::Region)?;
        let bits = u64::from(interrupts.0) << DEVICE_PORT;
        self.memory
            .ram
            .write_obj(pending | bits, at)
            .map_err(Ring3Error::Region)?;
        if self.idle { Ok(()) } else { self.interrupt() }
    }

    fn interrupt(&self) -> Result<(), Ring3Error> {
        let msi = kvm_msi {
            address_lo: 0xfee0_0000,
            data: u32::from(EVENT_VECTOR),
            ..Default::default()
        };
        self.vm
            .signal_msi(msi)
            .map(|_| ())
            .map_err(kvm("raise an interrupt"))
    }

    /// Takes what the guest printed since the last call.
    ///
    /// # Errors
    /// The monitor's region is out of reach (a bug).
    pub fn take_log(&mut self) -> Result<Vec<u8>, Ring3Error> {
        let mut shared = self.shared()?;
        // The guest can write anything here: take at most one ring.
        let n = shared.log_head.wrapping_sub(shared.log_tail).min(LOG_BYTES);
        if n == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = Vec::with_capacity(usize::try_from(n).unwrap_or(0));
        for i in 0..n {
            let at = shared.log_head.wrapping_sub(n).wrapping_add(i) % LOG_BYTES;
            let byte: u8 = self
                .memory
                .ram
                .read_obj(GuestAddress(self.ram + offset::LOG + at))
                .map_err(Ring3Error::Region)?;
            bytes.push(byte);
        }
        shared.log_tail = shared.log_head;
        self.put_shared(shared)?;
        Ok(bytes)
    }

    /// Reads the state of a paused VM.
    ///
    /// # Errors
    /// See [`Ring3Error`].
    pub fn save(&mut self) -> Result<Ring3State, Ring3Error> {
        // An exit that KVM has not finished (the rest of a port access, or of an instruction that touches
        // memory in several parts) would be lost with the vCPU.
        self.vcpu.set_kvm_immediate_exit(1);
        while self.finish_exit()? {}
        self.vcpu.set_kvm_immediate_exit(0);
        let mut cpu = CpuState::of(&self.vcpu, &self.cpuid)?;
        cpu.call_gate_again(|at| self.monitor_text(at));
        Ok(Ring3State {
            ram: self.ram,
            cpu,
            ns: self.now_ns(),
            deadline_ns: self.deadline_ns()?,
            idle: self.idle,
        })
    }

    /// Has KVM finish the last exit without entering the guest; whether that made another one.
    fn finish_exit(&mut self) -> Result<bool, Ring3Error> {
        let page = Self::memory_bytes(self.ram);
        let carried_out = match self.vcpu.run() {
            Ok(VcpuExit::MmioWrite(at, data)) if at < page => {
                touch(&self.vm, &mut self.slots, at)?;
                self.memory.ram.write_slice(data, GuestAddress(at))
            }
            Ok(VcpuExit::MmioRead(at, data)) if at < page => {
                touch(&self.vm, &mut self.slots, at)?;
                self.memory.ram.read_slice(data, GuestAddress(at))
            }
            Ok(VcpuExit::InternalError) => {
                return Ok(matches!(self.emulation_failed()?, At::Memory));
            }
            Ok(_) => return Ok(false),
            Err(e) if e.errno() == nix::libc::EINTR => return Ok(false),
            Err(e) => return Err(kvm("finish the last exit")(e)),
        };
        carried_out.map(|()| true).map_err(Ring3Error::Region)
    }

    /// Two bytes of the monitor's text at a virtual address.
    fn monitor_text(&self, at: u64) -> Option<[u8; 2]> {
        let text = layout::BASE..layout::BASE + offset::SHARED - 1;
        let from = text.contains(&at).then(|| self.ram + (at - text.start))?;
        self.memory.ram.read_obj(GuestAddress(from)).ok()
    }

    /// What to change in a saved copy of guest memory: (offset, value) of 8-byte words. Its clones take fewer
    /// faults with large pages of the kernel, and begin without the chunks that need not be known.
    ///
    /// # Errors
    /// KVM refuses to read the registers, or it cannot be told what the guest has touched.
    pub fn memory_fixups(&self) -> Result<Vec<(u64, u64)>, Ring3Error> {
        let cr3 = self.cr3()?;
        let deferred = if self.memory.is_anonymous() {
            tables::deferred(&self.memory, self.ram).map_err(Ring3Error::Touched)?
        } else {
            self.slots.deferred()
        };
        let list = (self.ram + offset::DEFERRED..).step_by(8).zip(deferred);
        Ok(list
            .chain(text::large_pages(&self.memory.ram, cr3))
            .collect())
    }

    fn set_clock(&mut self, tsc: u64, ns: u64) -> Result<(), Ring3Error> {
        let khz = self
            .vcpu
            .get_tsc_khz()
            .map_err(kvm("tell the TSC's frequency"))?;
        let (mul, shift) = layout::scale_of(khz.into());
        self.clock = Clock {
            tsc_base: tsc,
            ns_base: ns,
            tsc_khz: khz.into(),
            wall_base_ns: model::clock::unix_ns().saturating_sub(ns),
            mul,
            shift,
        };
        let mut shared = self.shared()?;
        shared.clock = self.clock;
        shared.clock_epoch += 1;
        self.put_shared(shared)
    }

    fn shared(&self) -> Result<Shared, Ring3Error> {
        let mut bytes = [0; size_of::<Shared>()];
        self.memory
            .ram
            .read_slice(&mut bytes, GuestAddress(self.ram + offset::SHARED))
            .map_err(Ring3Error::Region)?;
        Ok(image::decode_shared(&bytes))
    }

    fn put_shared(&self, shared: Shared) -> Result<(), Ring3Error> {
        self.memory
            .ram
            .write_slice(
                &image::encode_shared(&shared),
                GuestAddress(self.ram + offset::SHARED),
            )
            .map_err(Ring3Error::Region)
    }
}

/// Has KVM know the memory around an address.
fn touch(vm: &VmFd, slots: &mut Slots, at: u64) -> Result<(), Ring3Error> {
    slots.one(vm, at).map(|_| ()).map_err(kvm(REGISTER))
}

/// The list that [`Ring3::memory_fixups`] left in memory that was saved. A guest may have written anything there: it
/// is its own page faults that come out wrong.
fn read_deferred(memory: &Memory, ram: u64) -> Result<[u64; slots::WORDS], Ring3Error> {
    let mut words = [0; slots::WORDS];
    for (i, word) in words.iter_mut().enumerate() {
        let at = GuestAddress(ram + offset::DEFERRED + i as u64 * 8);
        *word = memory.ram.read_obj(at).map_err(Ring3Error::Region)?;
    }
    Ok(words)
}

enum At {
    Port(u16),
    Memory,
    Failed(String),
}
