//! CPU features that the guests of a template depend on. Each platform compares the ones that its guests can see.

use kvm_bindings::kvm_cpuid_entry2;

/// A register of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Register {
    fn of(self, entry: &kvm_cpuid_entry2) -> u32 {
        match self {
            Self::Eax => entry.eax,
            Self::Ebx => entry.ebx,
            Self::Ecx => entry.ecx,
            Self::Edx => entry.edx,
        }
    }
}

/// Registers whose bits are features.
const FEATURES: [(u32, u32, Register); 17] = [
    (1, 0, Register::Ecx),
    (1, 0, Register::Edx),
    (7, 0, Register::Ebx),
    (7, 0, Register::Ecx),
    (7, 0, Register::Edx),
    (7, 1, Register::Eax),
    (7, 1, Register::Edx),
    (7, 2, Register::Edx),
    (0xd, 0, Register::Eax),
    (0xd, 0, Register::Edx),
    (0xd, 1, Register::Eax),
    (0xd, 1, Register::Ecx),
    (0x8000_0001, 0, Register::Ecx),
    (0x8000_0001, 0, Register::Edx),
    (0x8000_0008, 0, Register::Ebx),
    (0x8000_0021, 0, Register::Eax),
    (0x4000_0001, 0, Register::Eax),
];

/// Bits of these registers that are state of a vCPU. KVM updates them in its table: MONITOR can follow MISC_ENABLE,
/// OSXSAVE and OSPKE follow CR4, APIC follows the base address of the local APIC.
const STATE: [(u32, u32, Register, u32); 3] = [
    (1, 0, Register::Ecx, 1 << 3 | 1 << 27),
    (1, 0, Register::Edx, 1 << 9),
    (7, 0, Register::Ecx, 1 << 4),
];

/// Bits of these registers that depend on the number of vCPUs: HTT and CmpLegacy.
const TOPOLOGY: [(u32, u32, Register, u32); 2] = [
    (1, 0, Register::Edx, 1 << 28),
    (0x8000_0001, 0, Register::Ecx, 1 << 1),
];

/// Names of features, as in Linux's /proc/cpuinfo if they are listed there. Other features are reported by leaf and
/// bit.
const NAMES: [(u32, u32, Register, u32, &str); 61] = [
    (1, 0, Register::Ecx, 12, "fma"),
    (1, 0, Register::Ecx, 17, "pcid"),
    (1, 0, Register::Ecx, 21, "x2apic"),
    (1, 0, Register::Ecx, 24, "tsc_deadline_timer"),
    (1, 0, Register::Ecx, 25, "aes"),
    (1, 0, Register::Ecx, 26, "xsave"),
    (1, 0, Register::Ecx, 28, "avx"),
    (1, 0, Register::Ecx, 30, "rdrand"),
    (7, 0, Register::Ebx, 0, "fsgsbase"),
    (7, 0, Register::Ebx, 5, "avx2"),
    (7, 0, Register::Ebx, 8, "bmi2"),
    (7, 0, Register::Ebx, 9, "erms"),
    (7, 0, Register::Ebx, 10, "invpcid"),
    (7, 0, Register::Ebx, 16, "avx512f"),
    (7, 0, Register::Ebx, 17, "avx512dq"),
    (7, 0, Register::Ebx, 18, "rdseed"),
    (7, 0, Register::Ebx, 21, "avx512ifma"),
    (7, 0, Register::Ebx, 28, "avx512cd"),
    (7, 0, Register::Ebx, 29, "sha_ni"),
    (7, 0, Register::Ebx, 30, "avx512bw"),
    (7, 0, Register::Ebx, 31, "avx512vl"),
    (7, 0, Register::Ecx, 1, "avx512vbmi"),
    (7, 0, Register::Ecx, 3, "pku"),
    (7, 0, Register::Ecx, 6, "avx512_vbmi2"),
    (7, 0, Register::Ecx, 8, "gfni"),
    (7, 0, Register::Ecx, 9, "vaes"),
    (7, 0, Register::Ecx, 10, "vpclmulqdq"),
    (7, 0, Register::Ecx, 11, "avx512_vnni"),
    (7, 0, Register::Ecx, 12, "avx512_bitalg"),
    (7, 0, Register::Ecx, 14, "avx512_vpopcntdq"),
    (7, 0, Register::Ecx, 16, "la57"),
    (7, 0, Register::Ecx, 22, "rdpid"),
    (7, 0, Register::Ecx, 25, "cldemote"),
    (7, 0, Register::Ecx, 27, "movdiri"),
    (7, 0, Register::Ecx, 28, "movdir64b"),
    (7, 0, Register::Edx, 4, "fsrm"),
    (7, 0, Register::Edx, 14, "serialize"),
    (7, 0, Register::Edx, 23, "avx512_fp16"),
    (7, 0, Register::Edx, 26, "spec_ctrl"),
    (7, 0, Register::Edx, 27, "intel_stibp"),
    (7, 0, Register::Edx, 31, "spec_ctrl_ssbd"),
    (7, 1, Register::Eax, 4, "avx_vnni"),
    (7, 1, Register::Eax, 5, "avx512_bf16"),
    (7, 2, Register::Edx, 0, "psfd"),
    (7, 2, Register::Edx, 1, "ipred_ctrl"),
    (7, 2, Register::Edx, 2, "rrsba_ctrl"),
    (7, 2, Register::Edx, 3, "ddpd_u"),
    (7, 2, Register::Edx, 4, "bhi_ctrl"),
    (7, 2, Register::Edx, 5, "mcdt_no"),
    (0xd, 0, Register::Eax, 3, "mpx"),
    (0xd, 0, Register::Eax, 17, "amx"),
    (0xd, 1, Register::Eax, 3, "xsaves"),
    (0x8000_0001, 0, Register::Edx, 26, "pdpe1gb"),
    (0x8000_0001, 0, Register::Edx, 27, "rdtscp"),
    (0x8000_0008, 0, Register::Ebx, 9, "wbnoinvd"),
    (0x8000_0008, 0, Register::Ebx, 25, "virt_ssbd"),
    (0x8000_0008, 0, Register::Ebx, 28, "amd_psfd"),
    (0x8000_0021, 0, Register::Eax, 6, "null_seg_clr_base"),
    (0x8000_0021, 0, Register::Eax, 8, "autoibrs"),
    (0x4000_0001, 0, Register::Eax, 3, "kvmclock"),
    (0x4000_0001, 0, Register::Eax, 24, "kvmclock-stable"),
];

pub(super) fn vendor(entries: &[kvm_cpuid_entry2]) -> Option<[u32; 3]> {
    let leaf = find(entries, 0, 0)?;
    Some([leaf.ebx, leaf.edx, leaf.ecx])
}

/// The name of the CPU: its brand, or its vendor and signature if it has no brand.
pub(super) fn cpu(entries: &[kvm_cpuid_entry2]) -> String {
    let leaves = (0x8000_0002..=0x8000_0004).filter_map(|function| find(entries, function, 0));
    let brand = text(leaves.flat_map(|e| [e.eax, e.ebx, e.ecx, e.edx]));
    if !brand.is_empty() {
        return brand;
    }
    let signature = value(entries, 1, 0, Register::Eax);
    format!("{} {signature:#x}", vendor_name(entries))
}

fn vendor_name(entries: &[kvm_cpuid_entry2]) -> String {
    text(vendor(entries).into_iter().flatten())
}

/// The printable characters of text in registers, because a template can contain any bytes.
fn text(registers: impl Iterator<Item = u32>) -> String {
    let bytes = registers.flat_map(u32::to_le_bytes).map(char::from);
    let printable: String = bytes.filter(|c| matches!(c, ' '..='~')).collect();
    printable.trim().to_owned()
}

/// Clears the bits that KVM derives from other state of the vCPU, so that a snapshot contains only the CPU's features.
pub(super) fn clear_state(entries: &mut [kvm_cpuid_entry2]) {
    for e in entries {
        let (function, index) = (e.function, e.index);
        e.ecx &= !bits_in(&STATE, function, index, Register::Ecx);
        e.edx &= !bits_in(&STATE, function, index, Register::Edx);
    }
}

/// The features that the template's guest uses and this host cannot offer.
pub(super) fn missing(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Vec<String> {
    if vendor(saved) != vendor(host) {
        return vec![format!("a CPU of the vendor {}", vendor_name(saved))];
    }
    let mut found = Vec::new();
    for (function, index, register) in FEATURES {
        // Templates of earlier releases also contain the state.
        let other = bits_in(&STATE, function, index, register)
            | bits_in(&TOPOLOGY, function, index, register);
        let bits = |entries| value(entries, function, index, register);
        let lost = bits(saved) & !bits(host) & !other;
        let lost = (0..32).filter(|bit| lost >> bit & 1 == 1);
        found.extend(lost.map(|bit| name(function, index, register, bit)));
    }
    let physical = |entries| value(entries, 0x8000_0008, 0, Register::Eax) & 0xff;
    let (wanted, here) = (physical(saved), physical(host));
    if wanted > here {
        found.push(format!(
            "{wanted} bits of physical addresses (it has {here})"
        ));
    }
    found
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    entries
        .iter()
        .find(|e| e.function == function && e.index == index)
}

fn value(entries: &[kvm_cpuid_entry2], function: u32, index: u32, register: Register) -> u32 {
    find(entries, function, index).map_or(0, |e| register.of(e))
}

/// The bits that `table` lists for a register.
fn bits_in(
    table: &[(u32, u32, Register, u32)],
    function: u32,
    index: u32,
    register: Register,
) -> u32 {
    let listed = table
        .iter()
        .find(|(f, i, r, _)| (*f, *i, *r) == (function, index, register));
    listed.map_or(0, |(.., bits)| *bits)
}

fn name(function: u32, index: u32, register: Register, bit: u32) -> String {
    let known = NAMES
        .iter()
        .find(|(f, i, r, b, _)| (*f, *i, *r, *b) == (function, index, register, bit));
    match known {
        Some((.., name)) => (*name).to_owned(),
        None => {
            let register = format!("{register:?}").to_lowercase();
            format!("CPUID {function:#x}.{index} {register} bit {bit}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn missing_features_are_named() {
        let saved = [leaf(0, 7), leaf(7, 1 << 16 | 1 << 1)];
        let host = [leaf(0, 7), leaf(7, 1 << 1)];
        assert_eq!(missing(&host, &saved), Vec::<String>::new());
        let lost = missing(&saved, &host);
        assert_eq!(lost[0], "avx512f");
        assert_eq!(lost[1], "la57");
        assert_eq!(lost[2], "CPUID 0x7.0 edx bit 16");
        let other = [leaf(0, u32::from_le_bytes(*b"Cube"))];
        assert_eq!(missing(&other, &host), ["a CPU of the vendor CubeCubeCube"]);
    }

    #[test]
    fn a_cpu_without_a_brand_is_named_by_vendor_and_signature() {
        let mut entries = vec![leaf(0, u32::from_le_bytes(*b"Cube")), leaf(1, 0x50)];
        assert_eq!(cpu(&entries), "CubeCubeCube 0x50");
        entries.push(leaf(0x8000_0002, u32::from_le_bytes(*b"\0\x1bX ")));
        assert_eq!(cpu(&entries), "X X X X");
    }
}
