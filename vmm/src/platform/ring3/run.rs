//! Running the guest and handling its exits.

use std::time::Duration;

use kvm_ioctls::{VcpuExit, VmFd};
use monitor::layout::{end, port};
use vm_memory::{Bytes, GuestAddress};

use super::error::{Ring3Error, kvm};
use super::slots::Slots;
use super::vm::{REGISTER, Ring3};
use super::{cpu, tables};
use crate::{
    platform::{EndReason, Exit},
    sys,
};

/// Length of the longest instruction in bytes (Intel SDM 2, 2.3.11).
const LONGEST_INSTRUCTION: u64 = 15;

impl Ring3 {
    /// Runs the guest until it exits.
    ///
    /// # Errors
    /// Returns [`Ring3Error`] if the monitor's region cannot be accessed (a bug), or KVM refuses to register memory or
    /// to read registers. If KVM cannot run the guest, the exit is [`EndReason::Failed`].
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
            // Other addresses have no device: writes are ignored, reads return ones.
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
            // port::LOG, and any other port that hostile guest code writes to.
            At::Port(_) => Ok(Exit::Resume),
            At::Memory => Ok(Exit::Memory),
            At::Failed(why) => Ok(Exit::Ended(EndReason::Failed(why))),
        }
    }

    /// Clears the request to leave KVM_RUN that a kick set.
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

    /// Handles an undefined-instruction exception (#UD) that the monitor reported.
    fn undefined(&mut self) -> Result<Exit, Ring3Error> {
        let mut shared = self.shared()?;
        self.reach(shared.undefined_at)?;
        shared.deferred = u64::from(!self.slots.complete());
        self.put_shared(shared)?;
        Ok(Exit::Memory)
    }

    /// Handles an instruction that KVM cannot emulate. If some memory has no slot yet, registers memory so that the
    /// instruction runs again.
    fn emulation_failed(&mut self) -> Result<At, Ring3Error> {
        if self.slots.complete() {
            return Ok(At::Failed("KVM stopped the guest: InternalError".into()));
        }
        let registers = self.vcpu.get_regs().map_err(kvm("read registers"))?;
        self.reach(registers.rip)?;
        cpu::take_undefined(&self.vcpu)?;
        Ok(At::Memory)
    }

    /// Registers the memory that contains an instruction. If it was registered already, the instruction may be one that
    /// KVM cannot emulate, and the memory that it accesses is unknown: then all memory is registered.
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

    pub(super) fn cr3(&self) -> Result<u64, Ring3Error> {
        let registers = self.vcpu.get_sregs();
        Ok(registers.map_err(kvm("read special registers"))?.cr3)
    }

    fn ended(&self) -> Result<Exit, Ring3Error> {
        Ok(Exit::Ended(match self.shared()?.end_reason {
            end::POWEROFF => EndReason::PowerOff,
            end::REBOOT => EndReason::Reboot,
            end::MONITOR => {
                EndReason::Failed("the monitor stopped (see the console for the reason)".into())
            }
            _ => EndReason::Crash,
        }))
    }

    /// Makes KVM finish the last exit without entering the guest; `immediate_exit` must be set. Returns whether that
    /// caused another exit.
    pub(super) fn finish_exit(&mut self) -> Result<bool, Ring3Error> {
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
}

/// Registers the memory around an address with KVM.
fn touch(vm: &VmFd, slots: &mut Slots, at: u64) -> Result<(), Ring3Error> {
    slots.one(vm, at).map(|_| ()).map_err(kvm(REGISTER))
}

enum At {
    Port(u16),
    Memory,
    Failed(String),
}
