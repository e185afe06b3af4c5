//! Tests of the rules by which a template is restored, on the tables of real CPUs in `cpus.txt`.

use std::collections::BTreeMap;

use kvm_bindings::kvm_cpuid_entry2;
use proptest::prelude::*;

use super::{
    cpu::check_features,
    cpuid::{of_host, of_vcpu},
    msrs,
};
use crate::platform::features::{clear_state, missing};

/// A CPU, as its KVM describes it.
#[derive(Clone, Debug)]
struct Cpu {
    name: String,
    cpuid: Vec<kvm_cpuid_entry2>,
    msrs: Vec<u32>,
}

/// All CPUs. CPUs of one vendor are ordered by age.
fn cpus() -> Vec<Cpu> {
    let mut cpus: Vec<Cpu> = Vec::new();
    let hex = |word: &str| u32::from_str_radix(word, 16).unwrap();
    for line in include_str!("cpus.txt").lines() {
        let (first, rest) = line.split_once(' ').unwrap_or_default();
        match (first, cpus.last_mut()) {
            ("" | "#", _) => {}
            ("cpu", _) => cpus.push(Cpu {
                name: rest.to_owned(),
                cpuid: brand(rest),
                msrs: Vec::new(),
            }),
            ("msrs", Some(cpu)) => cpu.msrs = rest.split(' ').map(hex).collect(),
            (leaf, Some(cpu)) => {
                let (function, index) = leaf.split_once('.').unwrap();
                let r: Vec<u32> = rest.split(' ').map(hex).collect();
                cpu.cpuid.push(entry(hex(function), hex(index), &r));
            }
            (_, None) => panic!("{line:?} is not of a CPU"),
        }
    }
    cpus
}

/// The leaves of a brand.
fn brand(name: &str) -> Vec<kvm_cpuid_entry2> {
    let bytes = format!("{name:\0<48}").into_bytes();
    let words = bytes
        .chunks(4)
        .map(|w| u32::from_le_bytes(w.try_into().unwrap()));
    let words: Vec<u32> = words.collect();
    let leaves = (0x8000_0002..).zip(words.chunks(4));
    leaves.map(|(f, words)| entry(f, 0, words)).collect()
}

fn entry(function: u32, index: u32, r: &[u32]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        index,
        eax: r[0],
        ebx: r[1],
        ecx: r[2],
        edx: r[3],
        ..Default::default()
    }
}

fn vendor(cpu: &Cpu) -> [u32; 3] {
    let leaf = cpu.cpuid.iter().find(|e| e.function == 0).unwrap();
    [leaf.ebx, leaf.edx, leaf.ecx]
}

/// Pairs of CPUs of one vendor: the older one (or the same), and the newer one.
fn pairs() -> Vec<(Cpu, Cpu)> {
    let cpus = cpus();
    let newer = |i: usize| cpus[i..].iter().map(move |newer| (i, newer));
    (0..cpus.len())
        .flat_map(newer)
        .map(|(i, newer)| (cpus[i].clone(), newer.clone()))
        .filter(|(older, newer)| vendor(older) == vendor(newer))
        .collect()
}

/// Bits that KVM changes in the table of a vCPU while the guest runs: OSXSAVE, MONITOR, APIC, OSPKE. Also the sizes in
/// leaf 0xd, which follow XCR0 and XSS.
fn toggle(cpuid: &mut [kvm_cpuid_entry2], bits: u32, size: u32) {
    let bit = |n: u32, at: u32| (bits >> n & 1) << at;
    for e in cpuid {
        match (e.function, e.index) {
            (1, _) => {
                e.ecx ^= bit(0, 27) | bit(1, 3);
                e.edx ^= bit(2, 9);
            }
            (7, 0) => e.ecx ^= bit(3, 4),
            (0xd, 0 | 1) => e.ebx = size,
            _ => {}
        }
    }
}

fn strategy() -> impl Strategy<Value = (Cpu, Cpu, u8, u8, u32, u32)> {
    let pair = prop::sample::select(pairs());
    let vcpus = (1_u8..=8).prop_flat_map(|count| (0..count, Just(count)));
    (pair, vcpus, 0_u32..16, any::<u32>())
        .prop_map(|((old, new), (id, n), bits, size)| (old, new, id, n, bits, size))
}

proptest! {
    #[test]
    fn a_template_restores_on_its_cpu_and_on_newer_ones_of_its_maker(
        (older, newer, id, count, bits, size) in strategy()
    ) {
        let mut saved = of_vcpu(&of_host(&older.cpuid), id, count);
        toggle(&mut saved, bits, size);
        // A template of a release that saved KVM's table unchanged.
        prop_assert_eq!(missing(&saved, &newer.cpuid), Vec::<String>::new());
        clear_state(&mut saved);
        prop_assert_eq!(missing(&saved, &newer.cpuid), Vec::<String>::new());
        for e in &saved {
            let state = match e.function {
                1 => e.ecx & (1 << 27 | 1 << 3),
                7 if e.index == 0 => e.ecx & 1 << 4,
                _ => 0,
            };
            prop_assert_eq!(state, 0, "leaf {:#x}", e.function);
        }
    }

    /// A CPU that lacks one feature of the template rejects it, and the error names the feature and both CPUs.
    #[test]
    fn a_cpu_that_lacks_a_feature_refuses_and_names_it(
        (older, newer, id, count, bits, size) in strategy(),
        lost in prop::sample::select(LOST.to_vec()),
    ) {
        let (function, index, change, name) = lost;
        let mut saved = of_vcpu(&of_host(&older.cpuid), id, count);
        toggle(&mut saved, bits, size);
        let mut host = newer.clone();
        let old = saved.iter().find(|e| (e.function, e.index) == (function, index)).copied();
        let new = host.cpuid.iter_mut().find(|e| (e.function, e.index) == (function, index));
        let (Some(mut old), Some(new)) = (old, new) else {
            return Ok(());
        };
        let had = old;
        change(&mut old);
        prop_assume!(old != had);
        change(new);
        let refused = check_features(&saved, &host.cpuid).unwrap_err().to_string();
        let expected = format!(
            "this CPU ({}) cannot run the template of another ({}), it lacks: {name}",
            newer.name, older.name
        );
        prop_assert_eq!(refused, expected);
    }
}

/// A leaf, the loss of one feature in it, and the feature's name.
type Lost = (u32, u32, fn(&mut kvm_cpuid_entry2), &'static str);

const LOST: [Lost; 12] = [
    (1, 0, |e| e.ecx &= !(1 << 17), "pcid"),
    (1, 0, |e| e.ecx &= !(1 << 25), "aes"),
    (1, 0, |e| e.ecx &= !(1 << 26), "xsave"),
    (7, 0, |e| e.ebx &= !(1 << 16), "avx512f"),
    (7, 0, |e| e.ecx &= !(1 << 3), "pku"),
    (7, 0, |e| e.ecx &= !(1 << 16), "la57"),
    (7, 0, |e| e.edx &= !(1 << 23), "avx512_fp16"),
    (7, 1, |e| e.eax &= !(1 << 5), "avx512_bf16"),
    (7, 2, |e| e.edx &= !(1 << 4), "bhi_ctrl"),
    (0xd, 1, |e| e.eax &= !(1 << 3), "xsaves"),
    (0x8000_0021, 0, |e| e.eax &= !(1 << 6), "null_seg_clr_base"),
    (
        0x8000_0008,
        0,
        |e| e.eax = (e.eax & !0xff) | 39,
        "40 bits of physical addresses (it has 39)",
    ),
];

#[test]
fn an_older_cpu_refuses_the_template_of_a_newer_one_with_the_names_of_features() {
    let new: BTreeMap<&str, &str> = [
        ("Intel Xeon, Cascade Lake", "avx512_vnni"),
        ("Intel Xeon, Ice Lake", "sha_ni"),
        ("Intel Xeon, Sapphire Rapids", "avx512_fp16"),
        ("Intel Xeon, Granite Rapids", "ddpd_u"),
        ("AMD EPYC, Zen 3", "pku"),
        ("AMD EPYC, Zen 4", "avx512f"),
    ]
    .into();
    for (older, newer) in pairs().into_iter().filter(|(a, b)| a.name != b.name) {
        let saved = of_vcpu(&of_host(&newer.cpuid), 0, 1);
        let lost = missing(&saved, &older.cpuid);
        let name = new[&*newer.name];
        assert!(lost.iter().any(|l| l == name), "{}: {lost:?}", newer.name);
    }
}

#[test]
fn a_cpu_of_another_maker_refuses_and_names_the_maker() {
    let cpus = cpus();
    let (intel, amd) = (&cpus[0], cpus.last().unwrap());
    let saved = of_vcpu(&of_host(&amd.cpuid), 0, 1);
    let refused = check_features(&saved, &intel.cpuid).unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.ends_with("it lacks: a CPU of the vendor AuthenticAMD"),
        "{refused}"
    );
}

/// The MSRs that the older CPU has and the newer one lacks are zero, unless the guest could use them.
#[test]
fn msrs_of_a_template_can_be_set_on_newer_cpus() {
    for (older, newer) in pairs() {
        if older.msrs.is_empty() || newer.msrs.is_empty() {
            continue;
        }
        let value = |index: &u32| u64::from(newer.msrs.contains(index));
        let saved: Vec<_> = older.msrs.iter().map(|i| (*i, value(i))).collect();
        let has = |batch: &[(u32, u64)]| {
            let refused = batch.iter().position(|(i, _)| !newer.msrs.contains(i));
            Ok(refused.unwrap_or(batch.len()))
        };
        let refused = msrs::set_by(&msrs::ordered(&saved), &newer.msrs, has);
        assert_eq!(refused.unwrap(), None, "{} on {}", older.name, newer.name);
    }
}
