//! Features of CPUs that the guests of a template depend on: each platform compares those that it lets guests see.

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
const FEATURES: [(u32, u32, Register); 14] = [
    (1, 0, Register::Ecx),
    (1, 0, Register::Edx),
    (7, 0, Register::Ebx),
    (7, 0, Register::Ecx),
    (7, 0, Register::Edx),
    (7, 1, Register::Eax),
    (0xd, 0, Register::Eax),
    (0xd, 0, Register::Edx),
    (0xd, 1, Register::Eax),
    (0xd, 1, Register::Ecx),
    (0x8000_0001, 0, Register::Ecx),
    (0x8000_0001, 0, Register::Edx),
    (0x8000_0008, 0, Register::Ebx),
    (0x4000_0001, 0, Register::Eax),
];

/// Names of features that are often missing. Other features are reported by leaf and bit.
const NAMES: [(u32, u32, Register, u32, &str); 22] = [
    (1, 0, Register::Ecx, 12, "fma"),
    (1, 0, Register::Ecx, 21, "x2apic"),
    (1, 0, Register::Ecx, 24, "tsc_deadline_timer"),
    (1, 0, Register::Ecx, 25, "aes"),
    (1, 0, Register::Ecx, 26, "xsave"),
    (1, 0, Register::Ecx, 28, "avx"),
    (1, 0, Register::Ecx, 30, "rdrand"),
    (7, 0, Register::Ebx, 0, "fsgsbase"),
    (7, 0, Register::Ebx, 5, "avx2"),
    (7, 0, Register::Ebx, 8, "bmi2"),
    (7, 0, Register::Ebx, 10, "invpcid"),
    (7, 0, Register::Ebx, 16, "avx512f"),
    (7, 0, Register::Ebx, 18, "rdseed"),
    (7, 0, Register::Ebx, 29, "sha_ni"),
    (7, 0, Register::Ecx, 3, "pku"),
    (7, 0, Register::Ecx, 8, "gfni"),
    (7, 0, Register::Ecx, 16, "la57"),
    (0xd, 1, Register::Eax, 3, "xsaves"),
    (0x8000_0001, 0, Register::Edx, 26, "pdpe1gb"),
    (0x8000_0001, 0, Register::Edx, 27, "rdtscp"),
    (0x4000_0001, 0, Register::Eax, 3, "kvmclock"),
    (0x4000_0001, 0, Register::Eax, 24, "kvmclock-stable"),
];

pub(super) fn vendor(entries: &[kvm_cpuid_entry2]) -> Option<[u32; 3]> {
    let leaf = entries.iter().find(|e| e.function == 0)?;
    Some([leaf.ebx, leaf.edx, leaf.ecx])
}

/// The features that the template's guest has and this host cannot offer.
pub(super) fn missing(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Vec<String> {
    if vendor(saved) != vendor(host) {
        return vec!["a CPU of the same vendor".to_owned()];
    }
    let mut found = Vec::new();
    for (function, index, register) in FEATURES {
        let bits = |entries: &[kvm_cpuid_entry2]| {
            let entry = |e: &&kvm_cpuid_entry2| e.function == function && e.index == index;
            entries.iter().find(entry).map_or(0, |e| register.of(e))
        };
        let mut lost = bits(saved) & !bits(host);
        // HTT and CmpLegacy depend on the number of vCPUs and are not features of the CPU.
        match (function, register) {
            (1, Register::Edx) => lost &= !(1 << 28),
            (0x8000_0001, Register::Ecx) => lost &= !(1 << 1),
            _ => {}
        }
        let lost = (0..32).filter(|bit| lost >> bit & 1 == 1);
        found.extend(lost.map(|bit| name(function, index, register, bit)));
    }
    found
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
        assert_eq!(missing(&[leaf(0, 1)], &host), ["a CPU of the same vendor"]);
    }
}
