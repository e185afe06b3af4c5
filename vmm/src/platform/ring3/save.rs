//! Saving a paused VM.

use monitor::layout::{self, offset};
use vm_memory::{Bytes, GuestAddress};

use super::cpu::CpuState;
use super::error::Ring3Error;
use super::state::Ring3State;
use super::vm::Ring3;
use super::{tables, text};

impl Ring3 {
    /// Reads the state of a paused VM.
    ///
    /// # Errors
    /// Returns [`Ring3Error`] if KVM refuses a step or the shared page cannot be accessed.
    pub fn save(&mut self) -> Result<Ring3State, Ring3Error> {
        // An exit that KVM has not finished (the rest of a port access, or of an instruction that accesses memory in
        // several parts) would be lost with the vCPU.
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

    /// Two bytes of the monitor's text at a virtual address.
    fn monitor_text(&self, at: u64) -> Option<[u8; 2]> {
        let text = layout::BASE..layout::BASE + offset::SHARED - 1;
        let from = text.contains(&at).then(|| self.ram + (at - text.start))?;
        self.memory.ram.read_obj(GuestAddress(from)).ok()
    }

    /// Changes for a saved copy of guest memory: (offset, value) of 8-byte words. With these changes, clones map the
    /// kernel's text in large pages, which saves faults, and start without slots for the chunks that KVM does not need.
    ///
    /// # Errors
    /// Returns [`Ring3Error`] if KVM refuses to read the registers, or the touched memory cannot be determined.
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
}
