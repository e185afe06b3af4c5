use super::*;

#[test]
fn a_cpu_without_features_of_the_template_is_refused() {
    let native = |function| {
        let found = sys::cpuid(function, 0);
        let (ebx, ecx, edx) = (found.ebx, found.ecx, found.edx);
        kvm_cpuid_entry2 {
            function,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    };
    let own = [0, 1, 7].map(native);
    check_features(&own).unwrap();
    // Bits that the kernel's list has and this CPU need not have: hypervisor, OSXSAVE, and hidden features.
    let mut listed = own;
    (listed[1].ecx, listed[1].edx) = (listed[1].ecx | 1 << 27 | 1 << 31, u32::MAX);
    check_features(&listed).unwrap();
    let mut other = own;
    other[0].ebx ^= 1;
    let why = check_features(&other).unwrap_err().to_string();
    assert!(why.contains("a CPU of the vendor"), "{why}");
    // A template of a CPU with all features, on a CPU that lacks some.
    let mut all = own;
    (all[1].ecx, all[2].ebx, all[2].ecx) = (u32::MAX, u32::MAX, u32::MAX);
    let lacks = (
        own[1].ecx & LEAF_1_ECX,
        own[2].ebx & LEAF_7_EBX,
        own[2].ecx & LEAF_7_ECX,
    ) != (LEAF_1_ECX, LEAF_7_EBX, LEAF_7_ECX);
    assert_eq!(check_features(&all).is_err(), lacks);
    assert!(missing(&detected(&all), &detected(&own)).is_empty() != lacks);
    let without = [own[0]];
    assert!(!missing(&detected(&own), &detected(&without)).is_empty());
}

/// The values are KVM's on an AMD EPYC with protection keys: x87, SSE, AVX, PKRU.
#[test]
fn the_xsave_area_ends_with_the_last_component_kept() {
    let leaf = |index, eax, ebx, ecx| kvm_cpuid_entry2 {
        function: 0xd,
        index,
        eax,
        ebx,
        ecx,
        ..Default::default()
    };
    let listed = [
        leaf(0, 0x207, 0x988, 0x988),
        leaf(1, 0, 0, 0),
        leaf(2, 0x100, 0x240, 0),
        leaf(9, 8, 0x980, 0),
    ];
    let mut seen: Vec<_> = listed.iter().filter_map(filter).collect();
    shrink_xsave_area(&mut seen);
    assert_eq!(seen[3], listed[3], "a program has to find every component");
    assert_eq!((seen[0].eax, seen[0].ebx, seen[0].ecx), (7, 0x340, 0x340));

    // Without AVX only the legacy region and the header remain.
    let mut seen = [leaf(0, 3, 0x988, 0x988)];
    shrink_xsave_area(&mut seen);
    assert_eq!((seen[0].ebx, seen[0].ecx), (0x240, 0x240));
}

#[test]
fn ring_0_features_are_hidden() {
    let all = kvm_cpuid_entry2 {
        function: 7,
        ebx: u32::MAX,
        ecx: u32::MAX,
        edx: u32::MAX,
        ..Default::default()
    };
    let seen = filter(&all).unwrap();
    for bit in [0, 7, 10, 20] {
        assert_eq!(seen.ebx >> bit & 1, 0, "ebx bit {bit}");
    }
    assert!(
        filter(&kvm_cpuid_entry2 {
            function: 0x4000_0001,
            ..all
        })
        .is_none()
    );
}
