//! The vCPU: its CPUID, its initial state, and its state in a snapshot.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_dtable,
    kvm_enable_cap, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use monitor::layout::{BASE, TIMER_VECTOR, TSS_SELECTOR, USER_CS, USER_SS, offset};
use serde::{Deserialize, Serialize};

use super::{
    domain::Start,
    error::{Ring3Error, kvm},
    gate,
    image::Entries,
};
use crate::{platform::features::missing, sys};

const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_CSTAR: u32 = 0xc000_0083;
const MSR_SYSCALL_MASK: u32 = 0xc000_0084;
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;
const MSR_TSC_AUX: u32 = 0xc000_0103;
const MSR_PAT: u32 = 0x277;
const MSR_MISC_ENABLE: u32 = 0x1a0;

/// MSRs in a snapshot. The TSC deadline is excluded, because the monitor arms it again.
const SAVED_MSRS: [u32; 8] = [
    MSR_STAR,
    MSR_LSTAR,
    MSR_CSTAR,
    MSR_SYSCALL_MASK,
    MSR_KERNEL_GS_BASE,
    MSR_TSC_AUX,
    MSR_PAT,
    MSR_MISC_ENABLE,
];

/// x87, SSE, AVX, AVX-512, as far as KVM supports them.
const XCR0_WANTED: u64 = 0xe7;

/// Features that a KVM which emulates ring 0 does not list, but that programs detect, because CPUID executes natively
/// at CPL 3. The kernel's CPUID must also have these features. Otherwise the kernel does not save their registers at a
/// context switch, and processes see each other's vector registers.
///
/// SSE3, PCLMULQDQ, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, AES, XSAVE, AVX, F16C, RDRAND.
const LEAF_1_ECX: u32 = 0x76d8_3203;
/// BMI1, AVX2, BMI2, ERMS, AVX-512 F and DQ, RDSEED, ADX, AVX-512 IFMA, CD, SHA, BW, VL.
const LEAF_7_EBX: u32 = 0xf02f_0328;
/// AVX-512 VBMI and VBMI2, GFNI, VAES, VPCLMULQDQ, AVX-512 VNNI, BITALG, VPOPCNTDQ.
const LEAF_7_ECX: u32 = 0x0000_5f42;

/// LAPIC registers by offset.
mod apic {
    pub(super) const SPURIOUS: usize = 0xf0;
    pub(super) const LVT_TIMER: usize = 0x320;
    /// Mode bits of the timer's LVT entry.
    pub(super) const TSC_DEADLINE: u32 = 2 << 17;
    pub(super) const ENABLED: u32 = 0x1ff;
}

/// Moves the I/O APIC to user space, where it is not used, and keeps the LAPIC in the kernel, so that the TSC-deadline
/// timer fires without an exit.
pub(super) fn split_irqchip(vm: &VmFd) -> Result<(), Ring3Error> {
    let mut cap = kvm_enable_cap {
        cap: kvm_bindings::KVM_CAP_SPLIT_IRQCHIP,
        ..Default::default()
    };
    cap.args[0] = 24;
    vm.enable_cap(&cap).map_err(kvm("split the irqchip"))
}

/// The CPUID for the guest kernel. On hosts of this platform CPUID executes natively at CPL 3, and KVM replaces some of
/// the values that it is given. The kernel puts Xen's prefix before CPUID, and the monitor returns the values of its
/// copy of this list.
pub(super) fn guest_cpuid(kvm_fd: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, Ring3Error> {
    let supported = kvm_fd
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm("list CPUID"))?;
    let mut entries: Vec<kvm_cpuid_entry2> =
        supported.as_slice().iter().filter_map(filter).collect();
    shrink_xsave_area(&mut entries);
    entries.extend(xen_leaves());
    Ok(entries)
}

/// Rejects a CPU that lacks features of the CPU on which the template was made. CPUID executes natively at CPL 3, so
/// programs have detected that CPU's features, whatever the saved list contains. KVM checks XSAVE components.
///
/// # Errors
/// Returns [`Ring3Error::Features`] with all missing features.
pub(super) fn check_features(saved: &[kvm_cpuid_entry2]) -> Result<(), Ring3Error> {
    let host = [0, 1, 7].map(|function| {
        let native = sys::cpuid(function, 0);
        kvm_cpuid_entry2 {
            function,
            ebx: native.ebx,
            ecx: native.ecx,
            edx: native.edx,
            ..Default::default()
        }
    });
    let lost = missing(&detected(saved), &detected(&host));
    if lost.is_empty() {
        Ok(())
    } else {
        Err(Ring3Error::Features(lost.join(", ")))
    }
}

/// The vendor, and the features that [`filter`] takes from the CPU itself.
fn detected(entries: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    let kept = entries.iter().filter_map(|entry| {
        let mut e = *entry;
        match (e.function, e.index) {
            (0, _) => {}
            (1, _) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, e.ecx & LEAF_1_ECX, 0),
            (7, 0) => {
                (e.eax, e.ebx, e.ecx, e.edx) = (0, e.ebx & LEAF_7_EBX, e.ecx & LEAF_7_ECX, 0);
            }
            _ => return None,
        }
        Some(e)
    });
    kept.collect()
}

/// Sets the size of the XSAVE area in leaf 0xd to the total of the components that `filter` kept (AMD APM volume 3,
/// E.4.13). KVM reports the size for all components of the host, including, for example, protection keys, which lie
/// beyond the vector registers. A kernel that finds a larger size than it expects disables XSAVE, and programs then see
/// each other's vector registers.
fn shrink_xsave_area(entries: &mut [kvm_cpuid_entry2]) {
    /// Legacy region and header. They contain x87 and SSE.
    const FIXED: u32 = 512 + 64;
    let wanted = |e: &&kvm_cpuid_entry2| {
        e.function == 0xd && (2..64).contains(&e.index) && XCR0_WANTED >> e.index & 1 == 1
    };
    let ends = entries.iter().filter(wanted);
    let size = ends.map(|e| e.ebx.saturating_add(e.eax)).max();
    let size = size.unwrap_or(FIXED).max(FIXED);
    for e in entries.iter_mut() {
        if (e.function, e.index) == (0xd, 0) {
            (e.ebx, e.ecx) = (size, size);
        }
    }
}

/// Sets CPUID. Must be called before any other state is set, because KVM checks XCR0 and MSRs against CPUID.
pub(super) fn set_cpuid(vcpu: &VcpuFd, entries: &[kvm_cpuid_entry2]) -> Result<(), Ring3Error> {
    let cpuid = CpuId::from_entries(entries)
        .map_err(|_| Ring3Error::State("more CPUID entries than KVM takes"))?;
    vcpu.set_cpuid2(&cpuid).map_err(kvm("set CPUID"))
}

fn clear(register: &mut u32, bits: &[u32]) {
    for bit in bits {
        *register &= !(1 << bit);
    }
}

/// Hides features from the guest kernel. It runs at CPL 3 with 4 KiB pages, so everything is hidden that needs ring 0,
/// global or large pages, or MSRs that neither KVM nor the monitor emulates.
fn filter(entry: &kvm_cpuid_entry2) -> Option<kvm_cpuid_entry2> {
    let mut e = *entry;
    match (e.function, e.index) {
        (1, _) => {
            // MONITOR, VMX, SMX, EIST, TM2, PDCM, PCID, x2APIC. The TSC deadline stays although the kernel does not use
            // it: KVM drops the monitor's timer unless the guest's CPUID has it.
            clear(&mut e.ecx, &[3, 5, 6, 7, 8, 15, 17, 21]);
            // OSXSAVE, hypervisor
            e.ecx |= 1 << 27 | 1 << 31;
            e.ecx |= sys::cpuid(1, 0).ecx & LEAF_1_ECX;
            // DE, PSE, MCE, MTRR, PGE, MCA, PSE36, DS, ACPI, TM
            clear(&mut e.edx, &[2, 3, 7, 12, 13, 14, 17, 21, 22, 29]);
        }
        (7, 0) => {
            // FSGSBASE, TSC_ADJUST, SMEP, INVPCID, RTM, PQM, MPX, SMAP, PT
            clear(&mut e.ebx, &[0, 1, 7, 10, 4, 11, 12, 14, 15, 20, 25]);
            // UMIP, PKU, OSPKE, CET_SS, LA57, RDPID, bus lock, ENQCMD, PKS
            clear(&mut e.ecx, &[2, 3, 4, 5, 7, 16, 22, 24, 29, 31]);
            // IBT, AMX, SPEC_CTRL and friends, ARCH_CAPABILITIES
            clear(&mut e.edx, &[20, 22, 24, 25, 26, 27, 28, 29, 30, 31]);
            let native = sys::cpuid(7, 0);
            e.ebx |= native.ebx & LEAF_7_EBX;
            e.ecx |= native.ecx & LEAF_7_ECX;
        }
        (0xa, _) => {
            (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0);
        }
        (0xd, 0) => {
            e.eax &= u32::try_from(XCR0_WANTED).unwrap_or(0);
            e.edx = 0;
        }
        (0xd, 1) => {
            // XSAVEOPT only: XSAVES and XSAVEC are privileged or emulated.
            (e.eax, e.ebx, e.ecx, e.edx) = (1, 0, 0, 0);
        }
        // Components outside XCR0_WANTED stay listed: the kernel ignores them, but XCR0 is the host's at CPL 3, and the
        // dynamic linker adds up the sizes of what XSAVEC writes.
        (0x8000_0001, _) => {
            // SVM, extended APIC, OSVW, IBS, SKINIT, WDT, LWP, perf counters, MWAITX
            clear(&mut e.ecx, &[2, 3, 9, 10, 12, 13, 15, 23, 24, 28, 29]);
            // PSE, MCE, MTRR, PGE, MCA, PSE36, 1 GiB pages
            clear(&mut e.edx, &[3, 7, 12, 13, 14, 17, 26]);
        }
        (0x8000_0007, _) => {
            (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0);
        }
        (0x8000_0008, _) => e.ebx = 0,
        (0x4000_0000..=0x4fff_ffff, _) => return None,
        (0x8000_000a, _) | (0x10 | 0x12 | 0x14, _) => return None,
        _ => {}
    }
    Some(e)
}

/// "XenVMMXenVMM", version 4.17, features (Xen public headers, `arch-x86/cpuid.h`).
fn xen_leaves() -> [kvm_cpuid_entry2; 5] {
    let leaf = |function, eax, ebx, ecx, edx| kvm_cpuid_entry2 {
        function,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    };
    [
        leaf(
            0x4000_0000,
            0x4000_0004,
            0x566e_6558,
            0x6558_4d4d,
            0x4d4d_566e,
        ),
        leaf(0x4000_0001, 4 << 16 | 17, 0, 0, 0),
        leaf(0x4000_0002, 0, 0x4000_0000, 1, 0),
        leaf(0x4000_0003, 0, 0, 0, 0),
        leaf(0x4000_0004, 0, 0, 0, 0),
    ]
}

/// Sets the registers for the start of the kernel at CPL 3.
pub(super) fn start(vcpu: &VcpuFd, entries: &Entries, at: &Start) -> Result<(), Ring3Error> {
    let mut sregs = vcpu.get_sregs().map_err(kvm("read special registers"))?;
    segments(&mut sregs);
    // PE MP ET NE WP AM PG; PAE OSFXSR OSXMMEXCPT FSGSBASE OSXSAVE; SCE LME LMA NXE.
    sregs.cr0 = 0x8005_0033;
    sregs.cr4 = 0x0005_0620;
    sregs.efer = 0xd01;
    sregs.cr3 = at.cr3;
    vcpu.set_sregs(&sregs)
        .map_err(kvm("set special registers"))?;
    set_xcr0(vcpu)?;
    vcpu.set_regs(&kvm_regs {
        rip: at.entry,
        rsp: at.stack,
        rsi: at.start_info,
        rflags: 0x202,
        ..Default::default()
    })
    .map_err(kvm("set registers"))?;
    // Flags that a system call clears: TF, IF, DF, NT, AC.
    let msrs = [
        (MSR_STAR, 0x0023_0010 << 32),
        (MSR_LSTAR, entries.syscall),
        (MSR_CSTAR, entries.syscall),
        (MSR_SYSCALL_MASK, 0x0004_4500),
        (MSR_MISC_ENABLE, 1),
    ];
    set_msrs(vcpu, &msrs)?;
    let mut lapic = vcpu.get_lapic().map_err(kvm("read the LAPIC"))?;
    write_apic(&mut lapic, apic::SPURIOUS, apic::ENABLED);
    write_apic(
        &mut lapic,
        apic::LVT_TIMER,
        apic::TSC_DEADLINE | u32::from(TIMER_VECTOR),
    );
    vcpu.set_lapic(&lapic).map_err(kvm("set the LAPIC"))?;
    let running = kvm_mp_state {
        mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE,
    };
    vcpu.set_mp_state(running)
        .map_err(kvm("make the vCPU runnable"))
}

fn segments(sregs: &mut kvm_sregs) {
    let flat = |selector, type_, l| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(USER_CS, 0xb, 1);
    let data = flat(USER_SS, 3, 0);
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: BASE + offset::TSS,
        limit: 0x67,
        selector: TSS_SELECTOR,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    // After a reset, LDTR describes a table of 64 KiB at address 0. The guest has none: `SET_LDT` does nothing.
    sregs.ldt = kvm_segment {
        unusable: 1,
        ..Default::default()
    };
    let table = |at, limit| kvm_dtable {
        base: BASE + at,
        limit,
        ..Default::default()
    };
    sregs.gdt = table(offset::GDT, 0x7f);
    sregs.idt = table(offset::IDT, 0xfff);
}

fn write_apic(lapic: &mut kvm_lapic_state, at: usize, value: u32) {
    for (slot, byte) in lapic.regs[at..at + 4].iter_mut().zip(value.to_le_bytes()) {
        *slot = byte.cast_signed();
    }
}

fn set_xcr0(vcpu: &VcpuFd) -> Result<(), Ring3Error> {
    let mut xcrs = vcpu.get_xcrs().map_err(kvm("read XCR0"))?;
    let supported = vcpu
        .get_cpuid2(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm("read CPUID"))?
        .as_slice()
        .iter()
        .find(|e| e.function == 0xd && e.index == 0)
        .map_or(3, |e| u64::from(e.eax));
    xcrs.nr_xcrs = 1;
    xcrs.xcrs[0].xcr = 0;
    xcrs.xcrs[0].value = supported & XCR0_WANTED;
    vcpu.set_xcrs(&xcrs).map_err(kvm("set XCR0"))
}

fn set_msrs(vcpu: &VcpuFd, pairs: &[(u32, u64)]) -> Result<(), Ring3Error> {
    let entries: Vec<kvm_msr_entry> = pairs
        .iter()
        .map(|(index, data)| kvm_msr_entry {
            index: *index,
            data: *data,
            ..Default::default()
        })
        .collect();
    let msrs = Msrs::from_entries(&entries).map_err(|_| Ring3Error::State("too many MSRs"))?;
    let n = vcpu.set_msrs(&msrs).map_err(kvm("set MSRs"))?;
    if n == entries.len() {
        Ok(())
    } else {
        Err(Ring3Error::State("an MSR that this host's KVM refuses"))
    }
}

/// Withdraws the #UD that KVM raised for an instruction that it could not emulate, so that the instruction runs again.
///
/// # Errors
/// Returns [`Ring3Error::Kvm`] if KVM refuses a step.
pub(super) fn take_undefined(vcpu: &VcpuFd) -> Result<(), Ring3Error> {
    const UNDEFINED: u8 = 6;
    let mut events = vcpu.get_vcpu_events().map_err(kvm("read pending events"))?;
    if events.exception.nr != UNDEFINED {
        return Ok(());
    }
    (events.exception.injected, events.exception.pending) = (0, 0);
    vcpu.set_vcpu_events(&events)
        .map_err(kvm("set pending events"))
}

/// CPU state in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub struct CpuState {
    /// The guest's CPUID since its boot. A clone takes it from here, because listing KVM's CPUID takes as long as
    /// creating a VM.
    cpuid: Vec<kvm_cpuid_entry2>,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xcrs: kvm_xcrs,
    xsave: kvm_xsave,
    lapic: kvm_lapic_state,
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
    debug: kvm_debugregs,
}

impl CpuState {
    pub(super) fn of(vcpu: &VcpuFd, cpuid: &[kvm_cpuid_entry2]) -> Result<Self, Ring3Error> {
        let wanted: Vec<kvm_msr_entry> = SAVED_MSRS
            .iter()
            .map(|index| kvm_msr_entry {
                index: *index,
                ..Default::default()
            })
            .collect();
        let mut msrs =
            Msrs::from_entries(&wanted).map_err(|_| Ring3Error::State("too many MSRs"))?;
        let n = vcpu.get_msrs(&mut msrs).map_err(kvm("read MSRs"))?;
        Ok(Self {
            cpuid: cpuid.to_vec(),
            regs: vcpu.get_regs().map_err(kvm("read registers"))?,
            sregs: vcpu.get_sregs().map_err(kvm("read special registers"))?,
            xcrs: vcpu.get_xcrs().map_err(kvm("read XCR0"))?,
            xsave: vcpu.get_xsave().map_err(kvm("read XSAVE state"))?,
            lapic: vcpu.get_lapic().map_err(kvm("read the LAPIC"))?,
            msrs: msrs.as_slice()[..n]
                .iter()
                .map(|m| (m.index, m.data))
                .collect(),
            events: vcpu.get_vcpu_events().map_err(kvm("read pending events"))?,
            mp_state: vcpu.get_mp_state().map_err(kvm("read the run state"))?,
            debug: vcpu.get_debug_regs().map_err(kvm("read debug registers"))?,
        })
    }

    /// Repeats an interrupted call of the monitor, see [`gate::call_again`].
    pub(super) fn call_gate_again(&mut self, text: impl Fn(u64) -> Option<[u8; 2]>) {
        gate::call_again(&mut self.regs, &self.sregs, &self.events, text);
    }

    pub(super) fn cpuid(&self) -> &[kvm_cpuid_entry2] {
        &self.cpuid
    }

    /// Sets all state. KVM refuses values that the CPU does not support; MSRs outside [`SAVED_MSRS`] are refused here.
    pub(super) fn apply(&self, vcpu: &VcpuFd) -> Result<(), Ring3Error> {
        if !self
            .msrs
            .iter()
            .all(|(index, _)| SAVED_MSRS.contains(index))
        {
            return Err(Ring3Error::State("an MSR that no snapshot holds"));
        }
        set_cpuid(vcpu, &self.cpuid)?;
        vcpu.set_sregs(&self.sregs)
            .map_err(kvm("set special registers"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(kvm("set XCR0"))?;
        sys::set_xsave(vcpu, &self.xsave).map_err(kvm("set XSAVE state"))?;
        set_msrs(vcpu, &self.msrs)?;
        vcpu.set_lapic(&self.lapic).map_err(kvm("set the LAPIC"))?;
        vcpu.set_debug_regs(&self.debug)
            .map_err(kvm("set debug registers"))?;
        vcpu.set_regs(&self.regs).map_err(kvm("set registers"))?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(kvm("set pending events"))?;
        vcpu.set_mp_state(self.mp_state)
            .map_err(kvm("set the run state"))
    }
}

#[cfg(test)]
mod tests;
