//! A vCPU: its initial state, and its state in a snapshot.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::{
    boot,
    error::{HvmError, kvm},
    msrs::{self, MSR_MISC_ENABLE, MSR_MTRR_DEFAULT},
};
use crate::{platform::features, sys};

/// Largest difference of TSC rates, in parts per million, that a guest with a measured rate tolerates: Linux treats it
/// as noise.
const TSC_TOLERANCE_PPM: u64 = 250;

/// The host's features, which a restore compares with a template.
#[derive(Debug)]
pub(super) struct Host {
    /// Features that the host can offer to guests.
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    /// The MSRs of this KVM that a snapshot contains.
    pub(super) msrs: Vec<u32>,
}

/// Sets CPUID. Must be called before any other state is set, because KVM checks XCR0 and MSRs against CPUID.
pub(super) fn prepare(vcpu: &VcpuFd, entries: &[kvm_cpuid_entry2]) -> Result<(), HvmError> {
    let cpuid = CpuId::from_entries(entries)
        .map_err(|_| HvmError::State("more CPUID entries than KVM takes"))?;
    vcpu.set_cpuid2(&cpuid).map_err(kvm("set CPUID"))
}

/// Sets the registers of vCPU 0 for the kernel's 64-bit entry. The kernel starts the other vCPUs.
pub(super) fn start(vcpu: &VcpuFd, entry: u64) -> Result<(), HvmError> {
    let mut sregs = vcpu.get_sregs().map_err(kvm("read special registers"))?;
    segments(&mut sregs);
    // PE ET NE PG, PAE, LME LMA.
    sregs.cr0 = 0x8000_0031;
    sregs.cr4 = 0x20;
    sregs.efer = 0x500;
    sregs.cr3 = boot::PAGE_TABLES;
    vcpu.set_sregs(&sregs)
        .map_err(kvm("set special registers"))?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsp: boot::STACK,
        rbp: boot::STACK,
        rsi: boot::ZERO_PAGE,
        rflags: 2,
        ..Default::default()
    })
    .map_err(kvm("set registers"))?;
    // Fast strings; MTRRs enabled, write-back as the default memory type.
    let initial = [(MSR_MISC_ENABLE, 1), (MSR_MTRR_DEFAULT, 1 << 11 | 6)];
    match msrs::set(vcpu, &initial, &[])? {
        None => Ok(()),
        Some(_) => Err(HvmError::State("an MSR that every CPU has is refused")),
    }
}

fn segments(sregs: &mut kvm_sregs) {
    let flat = |selector, type_, l| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(0x10, 0xb, 1);
    let data = flat(0x18, 3, 0);
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.gdt.base = boot::GDT;
    sregs.gdt.limit = boot::GDT_LIMIT;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
}

/// CPU state in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct CpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    tsc_khz: u32,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// `None` if KVM has no XSAVE.
    xcrs: Option<kvm_xcrs>,
    xsave: kvm_xsave,
    lapic: kvm_lapic_state,
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
    debug: kvm_debugregs,
}

impl CpuState {
    /// Reads the state of a vCPU, which must be out of the guest.
    pub(super) fn of(vcpu: &mut VcpuFd, listed: &[u32]) -> Result<Self, HvmError> {
        // An exit that KVM has not finished (the rest of a port access) would be lost with the vCPU.
        vcpu.set_kvm_immediate_exit(1);
        match vcpu.run() {
            Err(e) if [nix::libc::EINTR, nix::libc::EAGAIN].contains(&e.errno()) => {}
            Ok(_) => {}
            Err(e) => return Err(kvm("finish the last exit")(e)),
        }
        vcpu.set_kvm_immediate_exit(0);
        let cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES);
        let mut cpuid = cpuid.map_err(kvm("read CPUID"))?.as_slice().to_vec();
        features::clear_state(&mut cpuid);
        Ok(Self {
            // Must be first, because this call makes KVM deliver pending events.
            mp_state: vcpu.get_mp_state().map_err(kvm("read the run state"))?,
            cpuid,
            tsc_khz: vcpu
                .get_tsc_khz()
                .map_err(kvm("read the TSC's frequency"))?,
            regs: vcpu.get_regs().map_err(kvm("read registers"))?,
            sregs: vcpu.get_sregs().map_err(kvm("read special registers"))?,
            // Without the capability the call fails or returns no register.
            xcrs: vcpu.get_xcrs().ok().filter(|xcrs| xcrs.nr_xcrs > 0),
            xsave: vcpu.get_xsave().map_err(kvm("read XSAVE state"))?,
            lapic: vcpu.get_lapic().map_err(kvm("read the LAPIC"))?,
            msrs: msrs::get(vcpu, listed)?,
            events: vcpu.get_vcpu_events().map_err(kvm("read pending events"))?,
            debug: vcpu.get_debug_regs().map_err(kvm("read debug registers"))?,
        })
    }

    /// Checks that this host has the CPU features of the state, and that its MSRs are allowed in a snapshot. The TSC
    /// rate and the MSRs of this host are checked when the state is applied.
    pub(super) fn check(&self, host: &[kvm_cpuid_entry2]) -> Result<(), HvmError> {
        check_features(&self.cpuid, host)?;
        if !self.msrs.iter().all(|(index, _)| msrs::is_allowed(*index)) {
            return Err(HvmError::State("an MSR that no snapshot holds"));
        }
        Ok(())
    }

    /// Sets all state. KVM refuses values that the CPU does not support.
    pub(super) fn apply(&self, kvm_fd: &Kvm, vcpu: &VcpuFd, host: &Host) -> Result<(), HvmError> {
        prepare(vcpu, &self.cpuid)?;
        self.scale_tsc(kvm_fd, vcpu, host)?;
        vcpu.set_mp_state(self.mp_state)
            .map_err(kvm("set the run state"))?;
        vcpu.set_regs(&self.regs).map_err(kvm("set registers"))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(kvm("set special registers"))?;
        if let Some(xcrs) = &self.xcrs {
            vcpu.set_xcrs(xcrs).map_err(kvm("set XCR0"))?;
        }
        sys::set_xsave(vcpu, &self.xsave).map_err(kvm("set XSAVE state"))?;
        vcpu.set_debug_regs(&self.debug)
            .map_err(kvm("set debug registers"))?;
        vcpu.set_lapic(&self.lapic).map_err(kvm("set the LAPIC"))?;
        if let Some((index, data)) = msrs::set(vcpu, &msrs::ordered(&self.msrs), &host.msrs)? {
            let lost = format!("MSR {index:#x} with the value {data:#x}");
            return Err(lacks(&self.cpuid, &host.cpuid, vec![lost]));
        }
        vcpu.set_vcpu_events(&self.events)
            .map_err(kvm("set pending events"))
    }

    /// Makes the guest's TSC continue at the rate for which the guest is calibrated.
    fn scale_tsc(&self, kvm_fd: &Kvm, vcpu: &VcpuFd, host: &Host) -> Result<(), HvmError> {
        let here = vcpu
            .get_tsc_khz()
            .map_err(kvm("read the TSC's frequency"))?;
        let can_scale = || kvm_fd.check_extension(Cap::TscControl);
        if !needs_scaling(self.tsc_khz, here)
            || (can_scale() && vcpu.set_tsc_khz(self.tsc_khz).is_ok())
        {
            return Ok(());
        }
        let rate = format!(
            "a TSC of {} kHz (it has {here} and cannot scale)",
            self.tsc_khz
        );
        Err(lacks(&self.cpuid, &host.cpuid, vec![rate]))
    }
}

fn needs_scaling(wanted_khz: u32, here_khz: u32) -> bool {
    let off = u64::from(here_khz.abs_diff(wanted_khz)) * 1_000_000;
    off > u64::from(here_khz) * TSC_TOLERANCE_PPM
}

/// Checks that this host has the CPU features of a template.
pub(super) fn check_features(
    saved: &[kvm_cpuid_entry2],
    host: &[kvm_cpuid_entry2],
) -> Result<(), HvmError> {
    let missing = features::missing(saved, host);
    if missing.is_empty() {
        return Ok(());
    }
    Err(lacks(saved, host, missing))
}

fn lacks(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2], missing: Vec<String>) -> HvmError {
    HvmError::Missing {
        template: features::cpu(saved),
        host: features::cpu(host),
        missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tsc_rates_that_differ_by_more_than_noise_need_scaling() {
        // A TSC of 2 GHz: 250 ppm are 500 kHz.
        assert!(!needs_scaling(2_000_500, 2_000_000));
        assert!(!needs_scaling(1_999_500, 2_000_000));
        assert!(needs_scaling(2_000_501, 2_000_000));
        assert!(needs_scaling(1_999_499, 2_000_000));
        assert!(needs_scaling(u32::MAX, 1));
        assert!(needs_scaling(0, 2_000_000));
    }
}
