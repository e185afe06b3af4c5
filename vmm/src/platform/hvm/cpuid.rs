//! The guest's CPUID: KVM's list without the features that a restore could not preserve (performance counters, the
//! TSC's frequency, nested virtualization, tile state).

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use super::error::{HvmError, kvm};
use crate::platform::features::vendor;

/// KVM's paravirtual features for the guest (KVM API, `cpuid.rst`): both kvm-clock interfaces and the stable bit, no
/// I/O delay, steal time, end of interrupt, unhalt, TLB flush, IPI, yield. Asynchronous page faults are excluded,
/// because they would have to be drained before a snapshot.
const PARAVIRTUAL: u32 =
    1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 9 | 1 << 11 | 1 << 13 | 1 << 24;

/// XSAVE components that guests do not get: MPX, which newer CPUs lack, and AMX, whose state lies beyond the 4096 bytes
/// of `kvm_xsave` and is available only on request.
const HIDDEN_COMPONENTS: u32 = 3 << 3 | 3 << 17;

/// Maximum number of physical address bits that guests see, which is enough for any VM. The host's number depends on
/// settings of its firmware (memory encryption takes some), so a template with that number could be refused on an equal
/// CPU.
const PHYSICAL_BITS: u32 = 40;

/// The features that this host can offer to guests: KVM's list, with the bits that KVM leaves to the VMM.
pub(super) fn offered(kvm_fd: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, HvmError> {
    let supported = kvm_fd
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm("list CPUID"))?;
    let deadline = kvm_fd.check_extension(Cap::TscDeadlineTimer);
    let mut entries = supported.as_slice().to_vec();
    let mut has_xsave = false;
    for e in entries.iter_mut().filter(|e| e.function == 1) {
        set_if(&mut e.ecx, 24, deadline);
        // hypervisor
        e.ecx |= 1 << 31;
        has_xsave = e.ecx >> 26 & 1 == 1;
    }
    if !has_xsave || !kvm_fd.check_extension(Cap::Xcrs) {
        entries.retain(|e| e.function != 0xd);
        entries.iter_mut().for_each(hide_xsave);
    }
    Ok(entries)
}

/// The part of CPUID that is the same for all guests and vCPUs on this host.
pub(super) fn of_host(offered: &[kvm_cpuid_entry2]) -> Vec<kvm_cpuid_entry2> {
    offered.iter().filter_map(filter).collect()
}

/// Hides features that need XSAVE, for a KVM without it. Programs that check only a feature's own bit (coreutils 9.1
/// does) must not find the feature.
fn hide_xsave(e: &mut kvm_cpuid_entry2) {
    match (e.function, e.index) {
        // FMA, XSAVE, AVX, F16C
        (1, _) => clear(&mut e.ecx, &[12, 26, 28, 29]),
        (7, 0) => {
            // AVX2, and AVX512 F, DQ, IFMA, PF, ER, CD, BW, VL
            clear(&mut e.ebx, &[5, 16, 17, 21, 26, 27, 28, 30, 31]);
            // AVX512_VBMI, PKU, VBMI2, VAES, VPCLMULQDQ, VNNI, BITALG, VPOPCNTDQ
            clear(&mut e.ecx, &[1, 3, 6, 9, 10, 11, 12, 14]);
            // AVX512_4VNNIW, 4FMAPS, VP2INTERSECT, FP16
            clear(&mut e.edx, &[2, 3, 8, 23]);
        }
        // AVX_VNNI, AVX512_BF16, AVX_IFMA; AVX_VNNI_INT8 and similar
        (7, 1) => {
            clear(&mut e.eax, &[4, 5, 23]);
            clear(&mut e.edx, &[4, 5, 10, 19]);
        }
        // XOP, FMA4
        (0x8000_0001, _) => clear(&mut e.ecx, &[11, 16]),
        _ => {}
    }
}

fn clear(register: &mut u32, bits: &[u32]) {
    for bit in bits {
        *register &= !(1 << bit);
    }
}

fn filter(entry: &kvm_cpuid_entry2) -> Option<kvm_cpuid_entry2> {
    let mut e = *entry;
    match (e.function, e.index) {
        (1, _) => {
            // DTES64, MONITOR, DS-CPL, VMX, SMX, EIST, TM2, PDCM, DCA, OSXSAVE
            clear(&mut e.ecx, &[2, 3, 4, 5, 6, 7, 8, 15, 18, 27]);
            // MCE, MCA, DS, ACPI, TM
            clear(&mut e.edx, &[7, 14, 21, 22, 29]);
        }
        // ARAT: the local APIC's timer never stops.
        (6, _) => (e.eax, e.ebx, e.ecx, e.edx) = (e.eax & 4, 0, 0, 0),
        (7, 0) => {
            // SGX, HLE, RTM, PQM, MPX, PQE, PT
            clear(&mut e.ebx, &[2, 4, 11, 12, 14, 15, 25]);
            // WAITPKG, bus lock, ENQCMD, SGX launch control
            clear(&mut e.ecx, &[5, 24, 29, 30]);
            // TSXLDTRK, tiles, ARCH_CAPABILITIES
            clear(&mut e.edx, &[16, 22, 24, 25, 29]);
        }
        // More of tiles; AVX10, whose version is a number that another CPU cannot be compared with bit by bit.
        (7, 1) => {
            clear(&mut e.eax, &[21]);
            clear(&mut e.edx, &[8, 19]);
        }
        // MONITOR, performance counters
        (5 | 0xa, _) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
        (0xd, 0) => e.eax &= !HIDDEN_COMPONENTS,
        // XFD, which only tiles need.
        (0xd, 1) => clear(&mut e.eax, &[4]),
        (0xd, i) if i < 32 && HIDDEN_COMPONENTS >> i & 1 == 1 => return None,
        (0x8000_0001, _) => {
            // SVM, extended APIC, OSVW, IBS, SKINIT, WDT, LWP, counters, MWAITX
            clear(&mut e.ecx, &[2, 3, 9, 10, 12, 13, 15, 23, 24, 28, 29]);
            // MCE, MCA
            clear(&mut e.edx, &[7, 14]);
        }
        // No invariant TSC: a clone on another host can have another rate. The guest's clock is kvm-clock.
        (0x8000_0007, _) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
        (0x4000_0001, _) => (e.eax, e.edx) = (e.eax & PARAVIRTUAL, 0),
        // Topology (replaced below), resource control, SGX, PT, TSC and bus frequency, tiles, AVX10, SVM, memory
        // encryption, counters.
        (0xb | 0x1f | 0xf | 0x10 | 0x12 | 0x14..=0x16 | 0x1d | 0x1e | 0x24, _)
        | (0x8000_000a | 0x8000_001b | 0x8000_001c | 0x8000_001f | 0x8000_0022, _) => return None,
        _ => {}
    }
    Some(e)
}

/// CPUID of vCPU `id` of `count`: one package with one core per vCPU.
pub(super) fn of_vcpu(host: &[kvm_cpuid_entry2], id: u8, count: u8) -> Vec<kvm_cpuid_entry2> {
    let (id, count) = (u32::from(id), u32::from(count));
    let shift = count.next_power_of_two().trailing_zeros();
    let ids = 1 << shift;
    let mut entries = host.to_vec();
    for e in &mut entries {
        match e.function {
            1 => {
                e.ebx = (e.ebx & 0xff00) | id << 24 | ids << 16;
                set_if(&mut e.edx, 28, count > 1);
            }
            // Caches: levels 1 and 2 are private to a core, level 3 is shared by all.
            4 | 0x8000_001d if e.eax & 0x1f != 0 => {
                let sharing = if e.eax >> 5 & 7 < 3 { 0 } else { ids - 1 };
                e.eax = (e.eax & 0x3fff) | sharing << 14;
                if e.function == 4 {
                    e.eax |= (ids - 1) << 26;
                }
            }
            // CmpLegacy
            0x8000_0001 => set_if(&mut e.ecx, 1, count > 1 && is_amd(host)),
            0x8000_0008 => {
                e.eax = (e.eax & 0xff00) | (e.eax & 0xff).min(PHYSICAL_BITS);
                e.ecx = (e.ecx & !0xf0ff) | shift << 12 | (count - 1);
            }
            0x8000_001e => (e.eax, e.ebx, e.ecx) = (id, id, 0),
            _ => {}
        }
    }
    let max = host.iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
    if max >= 0xb {
        entries.push(topology(0, 0, 1, 1, id));
        entries.push(topology(1, shift, count, 2, id));
        entries.push(topology(2, 0, 0, 0, id));
    }
    entries
}

fn set_if(register: &mut u32, bit: u32, on: bool) {
    *register = (*register & !(1 << bit)) | u32::from(on) << bit;
}

/// A level of leaf 0xb. Kind 1 is SMT, 2 is cores, 0 ends the list.
fn topology(index: u32, shift: u32, count: u32, kind: u32, id: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | index,
        edx: id,
        ..Default::default()
    }
}

/// "AuthenticAMD" or "HygonGenuine".
fn is_amd(entries: &[kvm_cpuid_entry2]) -> bool {
    let name = |b: &[u8; 4]| u32::from_le_bytes(*b);
    let first = vendor(entries).map(|v| v[0]);
    first == Some(name(b"Auth")) || first == Some(name(b"Hygo"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::features::missing;

    fn leaf(function: u32, value: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            eax: value,
            ebx: value,
            ecx: value,
            edx: value,
            ..Default::default()
        }
    }

    #[test]
    fn features_that_a_restore_cannot_preserve_are_hidden() {
        let seen = filter(&leaf(1, u32::MAX)).unwrap();
        for bit in [3, 5, 15, 27] {
            assert_eq!(seen.ecx >> bit & 1, 0, "ecx bit {bit}");
        }
        assert_eq!(filter(&leaf(0x8000_0007, u32::MAX)).unwrap().edx, 0);
        assert!(filter(&leaf(0x15, 1)).is_none());
    }

    #[test]
    fn wide_vectors_are_hidden_without_xsave() {
        let mut seen = leaf(1, u32::MAX);
        hide_xsave(&mut seen);
        assert_eq!(seen.ecx, !(1 << 12 | 1 << 26 | 1 << 28 | 1 << 29));
    }

    #[test]
    fn each_vcpu_has_its_own_topology() {
        let host = [leaf(0, 0xb), leaf(1, 0), leaf(0x8000_0008, 0)];
        for id in 0..3 {
            let seen = of_vcpu(&host, id, 3);
            assert_eq!(seen[1].ebx >> 24, u32::from(id));
            assert_eq!(seen[1].ebx >> 16 & 0xff, 4);
            assert_eq!(seen[1].edx >> 28 & 1, 1);
            let cores = seen.iter().find(|e| e.function == 0xb && e.index == 1);
            assert_eq!(cores.map(|e| (e.eax, e.ebx)), Some((2, 3)));
            // The topology of a template with three vCPUs must not need features of the host.
            assert_eq!(missing(&seen, &host), Vec::<String>::new());
        }
    }
}
