//! A vCPU: its initial state, and its state in a snapshot.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::{
    boot,
    error::{HvmError, kvm},
};
use crate::{platform::features, sys};

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MSR_MTRR_DEFAULT: u32 = 0x2ff;
/// Limit on MSRs per call; longer lists are split.
const MSR_BATCH: usize = 128;
/// Largest difference of TSC rates, in parts per million, that a guest with a measured rate tolerates: Linux treats it
/// as noise.
const TSC_TOLERANCE_PPM: u64 = 250;

/// Whether a snapshot contains an MSR. Excluded are MSRs that describe the CPU (ARCH_CAPABILITIES, PERF_CAPABILITIES,
/// the VMX capabilities) and those of Hyper-V's interface, which guests do not have.
fn is_saved(index: u32) -> bool {
    !matches!(index, 0x10a | 0x345 | 0x480..=0x4ff | 0x4000_0000..=0x4000_01ff)
}

/// The MSRs of this KVM that a snapshot contains.
pub(super) fn saved_msrs(kvm_fd: &Kvm) -> Result<Vec<u32>, HvmError> {
    let list = kvm_fd
        .get_msr_index_list()
        .map_err(kvm("list MSRs"))?
        .as_slice()
        .to_vec();
    let mut list: Vec<u32> = list.into_iter().filter(|index| is_saved(*index)).collect();
    // Older kernels do not list this MSR, but it decides whether memory is cached.
    if !list.contains(&MSR_MTRR_DEFAULT) {
        list.push(MSR_MTRR_DEFAULT);
    }
    Ok(list)
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
    set_msrs(
        vcpu,
        &[(MSR_MISC_ENABLE, 1), (MSR_MTRR_DEFAULT, 1 << 11 | 6)],
    )
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

fn set_msrs(vcpu: &VcpuFd, pairs: &[(u32, u64)]) -> Result<(), HvmError> {
    for batch in pairs.chunks(MSR_BATCH) {
        let entries: Vec<kvm_msr_entry> = batch
            .iter()
            .map(|(index, data)| kvm_msr_entry {
                index: *index,
                data: *data,
                ..Default::default()
            })
            .collect();
        let msrs = Msrs::from_entries(&entries).map_err(|_| HvmError::State("too many MSRs"))?;
        let n = vcpu.set_msrs(&msrs).map_err(kvm("set MSRs"))?;
        if let Some((index, data)) = batch.get(n) {
            let what = format!("MSR {index:#x} with the value {data:#x}");
            return Err(HvmError::Missing(vec![what]));
        }
    }
    Ok(())
}

/// Reads the MSRs of `list` that can be read: KVM lists some that a guest with this CPUID does not have.
fn get_msrs(vcpu: &VcpuFd, list: &[u32]) -> Result<Vec<(u32, u64)>, HvmError> {
    let mut found = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(MSR_BATCH)];
        let wanted: Vec<kvm_msr_entry> = batch
            .iter()
            .map(|index| kvm_msr_entry {
                index: *index,
                ..Default::default()
            })
            .collect();
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| HvmError::State("too many MSRs"))?;
        let n = vcpu.get_msrs(&mut msrs).map_err(kvm("read MSRs"))?;
        found.extend(msrs.as_slice()[..n].iter().map(|m| (m.index, m.data)));
        // KVM stops at the first MSR that it cannot read; skip it.
        rest = &rest[(n + 1).min(batch.len()).max(n)..];
    }
    Ok(found)
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
    pub(super) fn of(vcpu: &mut VcpuFd, msrs: &[u32]) -> Result<Self, HvmError> {
        // An exit that KVM has not finished (the rest of a port access) would be lost with the vCPU.
        vcpu.set_kvm_immediate_exit(1);
        match vcpu.run() {
            Err(e) if [nix::libc::EINTR, nix::libc::EAGAIN].contains(&e.errno()) => {}
            Ok(_) => {}
            Err(e) => return Err(kvm("finish the last exit")(e)),
        }
        vcpu.set_kvm_immediate_exit(0);
        Ok(Self {
            // First, because this call makes KVM deliver pending events.
            mp_state: vcpu.get_mp_state().map_err(kvm("read the run state"))?,
            cpuid: vcpu
                .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
                .map_err(kvm("read CPUID"))?
                .as_slice()
                .to_vec(),
            tsc_khz: vcpu
                .get_tsc_khz()
                .map_err(kvm("read the TSC's frequency"))?,
            regs: vcpu.get_regs().map_err(kvm("read registers"))?,
            sregs: vcpu.get_sregs().map_err(kvm("read special registers"))?,
            // Without the capability the call fails or returns no register.
            xcrs: vcpu.get_xcrs().ok().filter(|xcrs| xcrs.nr_xcrs > 0),
            xsave: vcpu.get_xsave().map_err(kvm("read XSAVE state"))?,
            lapic: vcpu.get_lapic().map_err(kvm("read the LAPIC"))?,
            msrs: get_msrs(vcpu, msrs)?,
            events: vcpu.get_vcpu_events().map_err(kvm("read pending events"))?,
            debug: vcpu.get_debug_regs().map_err(kvm("read debug registers"))?,
        })
    }

    /// Checks that this host has the CPU features of the state, and that its MSRs are allowed in a snapshot. The TSC
    /// rate is checked when the state is applied.
    pub(super) fn check(&self, host: &[kvm_cpuid_entry2]) -> Result<(), HvmError> {
        let missing = features::missing(&self.cpuid, host);
        if !missing.is_empty() {
            return Err(HvmError::Missing(missing));
        }
        if !self.msrs.iter().all(|(index, _)| is_saved(*index)) {
            return Err(HvmError::State("an MSR that no snapshot holds"));
        }
        Ok(())
    }

    /// Sets all state. KVM refuses values that the CPU does not support.
    pub(super) fn apply(&self, kvm_fd: &Kvm, vcpu: &VcpuFd) -> Result<(), HvmError> {
        prepare(vcpu, &self.cpuid)?;
        self.scale_tsc(kvm_fd, vcpu)?;
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
        set_msrs(vcpu, &self.ordered_msrs())?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(kvm("set pending events"))
    }

    /// Orders the MSRs: first the TSC, last the TSC deadline, which refers to the TSC. A saved deadline of zero can
    /// mean that the timer has just expired. Its interrupt must not be lost, and an additional interrupt is harmless,
    /// so the timer is set to fire at once.
    fn ordered_msrs(&self) -> Vec<(u32, u64)> {
        let value = |index| self.msrs.iter().find(|(i, _)| *i == index).map(|m| m.1);
        let tsc = value(MSR_TSC);
        let deadline = value(MSR_TSC_DEADLINE).map(|at| match at {
            0 => tsc.unwrap_or(1),
            at => at,
        });
        let others = self.msrs.iter().copied();
        let others = others.filter(|(i, _)| ![MSR_TSC, MSR_TSC_DEADLINE].contains(i));
        tsc.map(|v| (MSR_TSC, v))
            .into_iter()
            .chain(others)
            .chain(deadline.map(|v| (MSR_TSC_DEADLINE, v)))
            .collect()
    }

    /// Makes the guest's TSC continue at the rate for which the guest is calibrated.
    fn scale_tsc(&self, kvm_fd: &Kvm, vcpu: &VcpuFd) -> Result<(), HvmError> {
        let here = vcpu
            .get_tsc_khz()
            .map_err(kvm("read the TSC's frequency"))?;
        let off = u64::from(here.abs_diff(self.tsc_khz)) * 1_000_000;
        if off <= u64::from(here) * TSC_TOLERANCE_PPM {
            return Ok(());
        }
        let scaled =
            kvm_fd.check_extension(Cap::TscControl) && vcpu.set_tsc_khz(self.tsc_khz).is_ok();
        if scaled {
            return Ok(());
        }
        Err(HvmError::Missing(vec![format!(
            "a TSC of {} kHz (it has {here} and cannot scale)",
            self.tsc_khz
        )]))
    }
}
