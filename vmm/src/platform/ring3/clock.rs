//! The guest's system time. It stops while the VM is paused.

use monitor::layout::{self, Clock};

use super::error::{Ring3Error, kvm};
use super::vm::Ring3;
use crate::sys;

impl Ring3 {
    /// Continues the guest's system time at `ns`, with the guest's timer due at the system time `deadline_ns` (`None`:
    /// no timer).
    pub(super) fn continue_clock(
        &mut self,
        ns: u64,
        deadline_ns: Option<u64>,
    ) -> Result<(), Ring3Error> {
        self.set_clock(sys::tsc(), ns)?;
        let mut shared = self.shared()?;
        shared.deadline_tsc = deadline_ns.map_or(0, |ns| self.clock.tsc_at(ns));
        self.put_shared(shared)?;
        if !self.idle {
            // The monitor reads the clock at its next entry; the interrupt causes one now.
            self.interrupt()?;
        }
        Ok(())
    }

    /// Stops the guest's system time until [`Ring3::resume`].
    pub fn pause(&mut self) {
        self.paused_ns = Some(self.now_ns());
    }

    /// Continues the guest's system time where [`Ring3::pause`] stopped it. Does nothing if the VM was not paused.
    ///
    /// # Errors
    /// Returns [`Ring3Error`] if the shared page cannot be accessed or KVM refuses the interrupt.
    pub fn resume(&mut self) -> Result<(), Ring3Error> {
        let Some(ns) = self.paused_ns.take() else {
            return Ok(());
        };
        let deadline_ns = self.deadline_ns()?;
        self.continue_clock(ns, deadline_ns)
    }

    /// System time of the guest in nanoseconds.
    pub(super) fn now_ns(&self) -> u64 {
        self.paused_ns
            .unwrap_or_else(|| self.clock.ns_at(sys::tsc()))
    }

    /// System time of the guest's next timer interrupt in nanoseconds; `None` if no timer is set.
    pub(super) fn deadline_ns(&self) -> Result<Option<u64>, Ring3Error> {
        let deadline = self.shared()?.deadline_tsc;
        Ok((deadline != 0).then(|| self.clock.ns_at(deadline)))
    }

    pub(super) fn set_clock(&mut self, tsc: u64, ns: u64) -> Result<(), Ring3Error> {
        let khz = self
            .vcpu
            .get_tsc_khz()
            .map_err(kvm("read the TSC's frequency"))?;
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
}
