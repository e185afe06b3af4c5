//! A VM of this platform: creation, interrupts, the console log and the page shared with the monitor.

use kvm_bindings::{kvm_cpuid_entry2, kvm_msi};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use monitor::layout::{Clock, DEVICE_PORT, EVENT_VECTOR, LOG_BYTES, Shared, offset};
use vm_memory::{Bytes, GuestAddress, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::boot_files::BootFiles;
use super::error::{Ring3Error, kvm};
use super::region::region_bytes;
use super::slots::{self, Slots};
use super::state::Ring3State;
use super::{cpu, domain, image};
use crate::{
    devices::{INTERRUPT_ACK, Interrupts, SLOT_STRIDE},
    memory::{Memory, MemoryError},
    sys,
};

/// KVM slot of the register page.
const REGISTER_SLOT: u32 = 0;
/// First KVM slot of guest memory.
const MEMORY_SLOT: u32 = 1;
/// The step that fails when KVM has no memory for a slot's metadata.
pub(super) const REGISTER: &str = "register guest memory";

/// A VM of this platform.
#[derive(Debug)]
pub struct Ring3 {
    pub(super) vm: VmFd,
    pub(super) vcpu: VcpuFd,
    pub(super) memory: Memory,
    pub(super) slots: Slots,
    pub(super) ram: u64,
    pub(super) registers: MmapRegion<()>,
    pub(super) _ack: EventFd,
    pub(super) clock: Clock,
    /// System time of the guest at which it was paused; `None` unless it was paused.
    pub(super) paused_ns: Option<u64>,
    pub(super) idle: bool,
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
}

impl Ring3 {
    /// Length of guest memory for `ram` bytes of RAM, the monitor's region included.
    #[must_use]
    pub fn memory_bytes(ram: u64) -> u64 {
        ram + region_bytes(ram)
    }

    /// Kernel parameters by which the guest's module finds the devices.
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
    /// Returns [`Ring3Error`] if the files cannot be loaded, memory cannot be mapped, or KVM refuses a step.
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
    /// Returns [`Ring3Error::State`] if the memory size does not match the state, and other variants if KVM refuses a
    /// step.
    pub fn restore(
        kvm_fd: &Kvm,
        memory: Memory,
        devices: usize,
        state: &Ring3State,
    ) -> Result<Self, Ring3Error> {
        if Self::memory_bytes(state.ram) != memory.bytes() {
            return Err(Ring3Error::State("memory size"));
        }
        cpu::check_features(state.cpu.cpuid())?;
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

    /// The vCPU, to install the kick.
    pub fn vcpu(&mut self) -> &mut VcpuFd {
        &mut self.vcpu
    }

    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Replaces the content of the register page.
    pub fn show_registers(&self, page: &[u8; 4096]) {
        use vm_memory::VolatileMemory;
        // The mapping has exactly this length.
        if let Ok(slice) = self.registers.get_slice(0, page.len()) {
            slice.copy_from(&page[..]);
        }
    }

    /// Raises device interrupts.
    ///
    /// # Errors
    /// Returns [`Ring3Error`] if the shared page cannot be accessed or KVM refuses the interrupt.
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

    pub(super) fn interrupt(&self) -> Result<(), Ring3Error> {
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

    /// Returns the console output since the last call.
    ///
    /// # Errors
    /// Returns [`Ring3Error::Region`] if the monitor's region cannot be accessed (a bug).
    pub fn take_log(&mut self) -> Result<Vec<u8>, Ring3Error> {
        let mut shared = self.shared()?;
        // The guest can write any value here, so at most one ring is read.
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

    pub(super) fn shared(&self) -> Result<Shared, Ring3Error> {
        let mut bytes = [0; size_of::<Shared>()];
        self.memory
            .ram
            .read_slice(&mut bytes, GuestAddress(self.ram + offset::SHARED))
            .map_err(Ring3Error::Region)?;
        Ok(image::decode_shared(&bytes))
    }

    pub(super) fn put_shared(&self, shared: Shared) -> Result<(), Ring3Error> {
        self.memory
            .ram
            .write_slice(
                &image::encode_shared(&shared),
                GuestAddress(self.ram + offset::SHARED),
            )
            .map_err(Ring3Error::Region)
    }
}

/// The chunk list that [`Ring3::memory_fixups`] wrote to saved memory. A guest may have overwritten the list; a wrong
/// list only breaks the guest's own page faults.
fn read_deferred(memory: &Memory, ram: u64) -> Result<[u64; slots::WORDS], Ring3Error> {
    let mut words = [0; slots::WORDS];
    for (i, word) in words.iter_mut().enumerate() {
        let at = GuestAddress(ram + offset::DEFERRED + i as u64 * 8);
        *word = memory.ram.read_obj(at).map_err(Ring3Error::Region)?;
    }
    Ok(words)
}
