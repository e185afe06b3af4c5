//! The `hvm` platform: VMX or SVM runs the guest kernel in ring 0, and KVM emulates the interrupt controllers.
//!
//! ```text
//! guest-physical   0            RAM (slot 0), at most 3 GiB of it
//!                  0xd0000000   register page of the devices (slot 1, read-only)
//!                  0xfec00000   I/O APIC      0xfee00000 local APICs     both KVM's
//!                  0x100000000  the rest of RAM (slot 2)
//! threads          the machine's thread runs vCPU 0 and owns the devices; `secondary` runs the others
//! ```
//! As on `ring3`, reads of the register page do not leave the guest, and an ioeventfd absorbs interrupt
//! acknowledgements; every other write is an exit. A halted vCPU stays in KVM_RUN; the signal of a ready descriptor
//! interrupts it.

mod acpi;
mod boot;
mod cpu;
mod cpuid;
mod error;
mod map;
mod msrs;
mod ports;
mod secondary;
mod step;
mod write;

#[cfg(test)]
mod restore_rules;

use std::sync::Arc;

use kvm_bindings::{KVM_MEM_READONLY, kvm_clock_data, kvm_irqchip};
use kvm_ioctls::{IoEventAddress, Kvm, NoDatamatch, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use cpu::CpuState;
pub use error::HvmError;
pub(super) use map::HOLE;

use super::ring3::BootFiles;
use crate::{
    devices::{INTERRUPT_ACK, Interrupts, PAGE_BYTES, SLOT_STRIDE},
    memory::{Memory, MemoryError},
    platform::{EndReason, Exit},
    sys,
};
use cpu::Host;
use error::kvm;
use map::{DEVICE_GSI, REGISTERS};
use ports::{Ports, SerialLine, SharedPorts, pulse};
use secondary::Secondaries;
use step::{Step, step};
use write::Write;

/// KVM slots of the RAM below and above the hole. The register page has the slot between them.
const RAM_SLOTS: [u32; 2] = [0, 2];
/// Three pages that VMX needs for real mode (KVM API 4.36), and one for its page table (4.63).
const TSS: usize = 0xfffb_d000;
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// Kernel parameters of this platform. `pci=off` saves the exits of a search for PCI, which the VM does not have.
pub(super) const PARAMETERS: &str = "console=ttyS0 clocksource=kvm-clock pci=off reboot=panic_warm";
/// The reset flag of the BIOS data area, which the kernel sets before a reset, and its value for a warm start.
const WARM_START: u64 = 0x472;
const WARM_START_MARK: u16 = 0x1234;

/// The platform's state in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct HvmState {
    ram: u64,
    cpus: Vec<CpuState>,
    /// Both PICs and the I/O APIC.
    irqchips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
    serial: SerialLine,
    /// Register writes of secondary vCPUs that the devices have not handled.
    writes: Vec<Write>,
}

/// A VM of this platform.
#[derive(Debug)]
pub struct Hvm {
    vm: Arc<VmFd>,
    vcpu: VcpuFd,
    secondaries: Secondaries,
    memory: Memory,
    registers: MmapRegion<()>,
    _ack: EventFd,
    ports: SharedPorts,
    /// The clock at the time of the pause; `None` unless the VM was paused.
    paused_clock: Option<kvm_clock_data>,
    /// Indices of the MSRs that a snapshot contains.
    msrs: Vec<u32>,
}

impl Hvm {
    /// Builds a VM with `ram` bytes of RAM that will start the kernel.
    ///
    /// # Errors
    /// Returns [`HvmError`] if the files cannot be loaded, memory cannot be mapped, or KVM refuses a step.
    pub fn boot(
        kvm_fd: &Kvm,
        ram: u64,
        vcpus: u8,
        devices: usize,
        files: BootFiles<'_>,
    ) -> Result<Self, HvmError> {
        let memory = Memory::anonymous(ram, Some(HOLE))?;
        let entry = boot::load(&memory.ram, ram, vcpus, devices, files)?;
        let (mut this, others) = Self::new(kvm_fd, memory, vcpus, devices)?;
        let host = cpuid::of_host(&cpuid::offered(kvm_fd)?);
        for (id, vcpu) in (0..vcpus).zip(std::iter::once(&this.vcpu).chain(&others)) {
            cpu::prepare(vcpu, &cpuid::of_vcpu(&host, id, vcpus))?;
        }
        cpu::start(&this.vcpu, entry)?;
        this.secondaries.start(others, Vec::new(), &this.ports)?;
        Ok(this)
    }

    /// Builds a clone on the template's memory. The guest does not run yet.
    ///
    /// # Errors
    /// Returns [`HvmError::State`] for invalid state, [`HvmError::Missing`] if the CPU lacks a feature, and other
    /// variants if KVM refuses a step.
    pub fn restore(
        kvm_fd: &Kvm,
        memory: Memory,
        devices: usize,
        state: &HvmState,
    ) -> Result<Self, HvmError> {
        if state.ram != memory.bytes() {
            return Err(HvmError::State("memory size"));
        }
        let vcpus = u8::try_from(state.cpus.len()).unwrap_or(u8::MAX);
        if vcpus == 0 || vcpus > 8 || state.irqchips.len() != IRQCHIPS.len() {
            return Err(HvmError::State("number of vCPUs or interrupt controllers"));
        }
        let host = Host {
            cpuid: cpuid::offered(kvm_fd)?,
            msrs: msrs::listed(kvm_fd)?,
        };
        for cpu in &state.cpus {
            cpu.check(&host.cpuid)?;
        }
        let (mut this, others) = Self::new(kvm_fd, memory, vcpus, devices)?;
        for (cpu, vcpu) in state
            .cpus
            .iter()
            .zip(std::iter::once(&this.vcpu).chain(&others))
        {
            cpu.apply(kvm_fd, vcpu, &host)?;
        }
        for (id, chip) in IRQCHIPS.into_iter().zip(&state.irqchips) {
            let mut chip = *chip;
            chip.chip_id = id;
            this.vm
                .set_irqchip(&chip)
                .map_err(kvm("set an interrupt controller"))?;
        }
        this.set_clock(&state.clock)?;
        ports::lock(&this.ports).restore(&state.serial)?;
        this.secondaries
            .start(others, state.writes.clone(), &this.ports)?;
        Ok(this)
    }

    /// Creates a VM without CPU state. Also returns all its vCPUs except vCPU 0.
    fn new(
        kvm_fd: &Kvm,
        memory: Memory,
        vcpus: u8,
        devices: usize,
    ) -> Result<(Self, Vec<VcpuFd>), HvmError> {
        let vm = kvm_fd.create_vm().map_err(kvm("create a VM"))?;
        vm.set_identity_map_address(IDENTITY_MAP)
            .map_err(kvm("place its real-mode page table"))?;
        vm.set_tss_address(TSS)
            .map_err(kvm("place its real-mode task state"))?;
        vm.create_irq_chip()
            .map_err(kvm("create interrupt controllers"))?;
        for (slot, region) in RAM_SLOTS.into_iter().zip(memory.regions()) {
            sys::set_ram(&vm, slot, region).map_err(kvm("register guest memory"))?;
        }
        let bytes = PAGE_BYTES as u64;
        let registers = MmapRegion::new(PAGE_BYTES)
            .map_err(|source| HvmError::Memory(MemoryError::Map { bytes, source }))?;
        let host = registers.as_ptr();
        sys::set_slot(&vm, 1, REGISTERS, host, bytes, KVM_MEM_READONLY)
            .map_err(kvm("register the register page"))?;
        let ack = EventFd::new(EFD_NONBLOCK).map_err(|e| HvmError::Resource("an eventfd", e))?;
        for device in 0..devices as u64 {
            let at = IoEventAddress::Mmio(REGISTERS + device * SLOT_STRIDE + INTERRUPT_ACK);
            vm.register_ioevent(&ack, &at, NoDatamatch)
                .map_err(kvm("register an ioeventfd"))?;
        }
        let create = |id| vm.create_vcpu(id).map_err(kvm("create a vCPU"));
        let vcpu = create(0)?;
        let others = (1..u64::from(vcpus))
            .map(create)
            .collect::<Result<_, _>>()?;
        let vm = Arc::new(vm);
        let this = Self {
            secondaries: Secondaries::default(),
            ports: Ports::shared(&vm),
            paused_clock: None,
            msrs: msrs::listed(kvm_fd)?,
            vm,
            vcpu,
            memory,
            registers,
            _ack: ack,
        };
        Ok((this, others))
    }

    /// The vCPU that runs on the machine's thread, to install the kick.
    pub fn vcpu(&mut self) -> &mut VcpuFd {
        &mut self.vcpu
    }

    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Replaces the content of the register page.
    pub fn show_registers(&self, page: &[u8; PAGE_BYTES]) {
        use vm_memory::VolatileMemory;
        // The mapping has exactly this length.
        if let Ok(slice) = self.registers.get_slice(0, page.len()) {
            slice.copy_from(&page[..]);
        }
    }

    /// Runs the guest until vCPU 0 exits or another vCPU needs the owner of the devices.
    ///
    /// # Errors
    /// Never fails: failures of KVM become [`EndReason::Failed`]. Returns a `Result` because `ring3` does.
    pub fn run(&mut self) -> Result<Exit, HvmError> {
        self.secondaries.served();
        match self.secondaries.next() {
            Some(Exit::Ended(reason)) => return Ok(self.ended(reason)),
            Some(exit) => return Ok(exit),
            None => {}
        }
        self.secondaries.resume();
        loop {
            match step(&mut self.vcpu, &self.ports) {
                Step::Again => {}
                Step::Kicked | Step::Printed => return Ok(Exit::Resume),
                Step::Write(Write { offset, bytes, len }) => {
                    let len = usize::from(len);
                    return Ok(Exit::DeviceWrite { offset, bytes, len });
                }
                Step::Ended(reason) => return Ok(self.ended(reason)),
            }
        }
    }

    /// Stops all vCPUs after the guest has ended. A panic and a reboot both reset the machine; `reboot=panic_warm`
    /// makes the kernel leave the mark of a warm start in memory before the reset of a panic, which distinguishes
    /// the two.
    fn ended(&mut self, reason: EndReason) -> Exit {
        self.stop();
        let mark: Option<u16> = self.memory.ram.read_obj(GuestAddress(WARM_START)).ok();
        Exit::Ended(match reason {
            EndReason::Reboot if mark == Some(WARM_START_MARK) => EndReason::Crash,
            reason => reason,
        })
    }

    /// Clears the exit request that a kick has set.
    pub fn clear_kick(&mut self) {
        self.vcpu.set_kvm_immediate_exit(0);
    }

    /// Takes every vCPU out of the guest until the next [`Hvm::run`], and saves the clock for [`Hvm::resume`].
    ///
    /// # Errors
    /// Returns [`HvmError::Kvm`] if KVM cannot read the clock.
    pub fn pause(&mut self) -> Result<(), HvmError> {
        self.stop();
        if self.paused_clock.is_none() {
            let clock = self.vm.get_clock().map_err(kvm("read the clock"))?;
            self.paused_clock = Some(clock);
        }
        Ok(())
    }

    /// Continues kvm-clock from the time of the pause. The time-stamp counter was not stopped, so a timer that the
    /// guest set by the counter fires early, which Linux tolerates.
    ///
    /// # Errors
    /// Returns [`HvmError::Kvm`] if KVM refuses the clock.
    pub fn resume(&mut self) -> Result<(), HvmError> {
        match self.paused_clock.take() {
            Some(clock) => self.set_clock(&clock),
            None => Ok(()),
        }
    }

    fn set_clock(&self, clock: &kvm_clock_data) -> Result<(), HvmError> {
        // Without flags the clock continues at exactly this value.
        let clock = kvm_clock_data {
            clock: clock.clock,
            ..Default::default()
        };
        self.vm.set_clock(&clock).map_err(kvm("set the clock"))
    }

    fn stop(&mut self) {
        self.secondaries.pause();
        // Keeps the guest's watchdogs from counting the time of the pause. The call fails while the guest does not use
        // kvm-clock, and then it is not needed.
        let _ = self.vcpu.kvmclock_ctrl();
        for vcpu in self.secondaries.vcpus() {
            let _ = secondary::lock(vcpu).kvmclock_ctrl();
        }
    }

    /// Raises device interrupts as edges.
    ///
    /// # Errors
    /// Returns [`HvmError::Kvm`] if KVM refuses the interrupt.
    pub fn raise(&mut self, interrupts: Interrupts) -> Result<(), HvmError> {
        for slot in interrupts.slots() {
            let slot = u32::try_from(slot).unwrap_or(0);
            pulse(&self.vm, DEVICE_GSI + slot).map_err(kvm("raise an interrupt"))?;
        }
        Ok(())
    }

    /// Returns the console output since the last call.
    #[must_use]
    pub fn take_log(&mut self) -> Vec<u8> {
        ports::lock(&self.ports).take_log()
    }

    /// Reads the state of a paused VM.
    ///
    /// # Errors
    /// Returns [`HvmError::Kvm`] if KVM refuses a step.
    pub fn save(&mut self) -> Result<HvmState, HvmError> {
        self.stop();
        let mut cpus = vec![CpuState::of(&mut self.vcpu, &self.msrs)?];
        for vcpu in self.secondaries.vcpus() {
            cpus.push(CpuState::of(&mut secondary::lock(vcpu), &self.msrs)?);
        }
        let mut irqchips = Vec::new();
        for id in IRQCHIPS {
            let mut chip = kvm_irqchip {
                chip_id: id,
                ..Default::default()
            };
            self.vm
                .get_irqchip(&mut chip)
                .map_err(kvm("read an interrupt controller"))?;
            irqchips.push(chip);
        }
        Ok(HvmState {
            ram: self.memory.bytes(),
            cpus,
            irqchips,
            clock: match self.paused_clock {
                Some(clock) => clock,
                None => self.vm.get_clock().map_err(kvm("read the clock"))?,
            },
            serial: ports::lock(&self.ports).line(),
            writes: self.secondaries.waiting(),
        })
    }
}

const IRQCHIPS: [u32; 3] = [
    kvm_bindings::KVM_IRQCHIP_PIC_MASTER,
    kvm_bindings::KVM_IRQCHIP_PIC_SLAVE,
    kvm_bindings::KVM_IRQCHIP_IOAPIC,
];
