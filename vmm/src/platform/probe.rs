//! Detects which platform KVM on this host offers, by timing a few thousand guest instructions.
//!
//! A loop runs at CPL 0 and at CPL 3, and ends with an invalid opcode without an IDT, which is a shutdown exit. If
//! instructions in a ring take hundreds of times as long as native ones, KVM emulates that ring.

use std::{arch::x86_64::__cpuid, time::Duration};

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit};
use model::Platform;
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use crate::{error::MachineError, memory::Memory, sys};

/// Iterations of the two-instruction loop.
const LOOPS: u64 = 1000;
/// Number of measurements before a ring counts as emulated.
const ROUNDS: u32 = 8;
/// Like [`ROUNDS`], for ring 0 of a CPU that announces VMX or SVM. Ring 0 of such a CPU is almost certainly native, and
/// slow runs mean that the host is busy: if this host is itself a VM, the CPU time that it measures includes time in
/// which its own host ran other work.
const ROUNDS_ANNOUNCED: u32 = 100;
/// Time per iteration, in nanoseconds, from which a ring counts as emulated. Native iterations take less than 2 ns (20
/// to 120 ns where QEMU emulates the CPU), emulated ones more than 500 ns.
const EMULATED_NS: u64 = 300;

/// The result of the probe.
#[derive(Debug, Clone, Serialize)]
pub struct HostPlatform {
    /// The platform of this host; `None` if neither ring runs natively.
    pub platform: Option<Platform>,
    /// The reason as text, with the measured times.
    pub why: String,
    /// Time per iteration at CPL 0 in nanoseconds; `None` if the loop did not run.
    pub ring0_ns: Option<u64>,
    /// Time per iteration at CPL 3 in nanoseconds; `None` if the loop did not run.
    pub ring3_ns: Option<u64>,
}

/// Probes this host.
///
/// # Errors
/// Returns [`MachineError::NoKvm`] if /dev/kvm cannot be opened.
pub fn host() -> Result<HostPlatform, MachineError> {
    let kvm = Kvm::new().map_err(|e| MachineError::NoKvm(e.into()))?;
    let ring0_ns = iteration_ns(&kvm, 0);
    let ring3_ns = iteration_ns(&kvm, 3);
    Ok(classify(ring0_ns, ring3_ns))
}

/// The platform for VMs on this host.
///
/// # Errors
/// Returns [`MachineError::Unsuitable`] if neither ring runs natively.
pub fn platform(kvm: &Kvm) -> Result<Platform, MachineError> {
    let ring0_ns = iteration_ns(kvm, 0);
    if native(ring0_ns) {
        return Ok(Platform::Hvm);
    }
    let found = classify(ring0_ns, iteration_ns(kvm, 3));
    found.platform.ok_or(MachineError::Unsuitable(found.why))
}

fn native(ns: Option<u64>) -> bool {
    ns.is_some_and(|ns| ns < EMULATED_NS)
}

fn classify(ring0_ns: Option<u64>, ring3_ns: Option<u64>) -> HostPlatform {
    let platform = match (native(ring0_ns), native(ring3_ns)) {
        (true, _) => Some(Platform::Hvm),
        (false, true) => Some(Platform::Ring3),
        (false, false) => None,
    };
    let figure = |ns: Option<u64>| ns.map_or("did not run".to_owned(), |ns| format!("{ns} ns"));
    let conclusion = match platform {
        Some(Platform::Hvm) => "ring 0 is native: hardware virtualization",
        Some(Platform::Ring3) => {
            "ring 3 is native and ring 0 is emulated: no VMX or SVM underneath"
        }
        None => "neither ring runs natively: KVM does not work on this host",
    };
    HostPlatform {
        platform,
        why: format!(
            "{conclusion} (a two-instruction loop at ring 0: {}, at ring 3: {})",
            figure(ring0_ns),
            figure(ring3_ns)
        ),
        ring0_ns,
        ring3_ns,
    }
}

/// Time per iteration in nanoseconds. Noise only makes runs slower, so one fast long run is sufficient. Otherwise the
/// result is computed from the fastest long run minus the fastest run of one iteration, which cancels the cost of the
/// exits. Returns `None` if the loop did not run.
fn iteration_ns(kvm: &Kvm, cpl: u8) -> Option<u64> {
    let mut empty = Duration::MAX;
    let mut full = Duration::MAX;
    let mut ns = None;
    for round in 1..=ROUNDS_ANNOUNCED {
        empty = empty.min(run(kvm, cpl, 1)?);
        full = full.min(run(kvm, cpl, LOOPS)?);
        if let Some(ns) = fast(full) {
            return Some(ns);
        }
        ns = u64::try_from(full.saturating_sub(empty).as_nanos() / u128::from(LOOPS)).ok();
        if round >= ROUNDS && (native(ns) || cpl != 0 || !announces_virtualization()) {
            break;
        }
    }
    ns
}

/// Whether CPUID announces VMX (Intel SDM, leaf 1, ECX 5) or SVM (AMD APM, leaf 8000_0001, ECX 2). Without them KVM's
/// modules for hardware virtualization do not load.
pub(crate) fn announces_virtualization() -> bool {
    let has_svm = __cpuid(0x8000_0000).eax > 0x8000_0000 && __cpuid(0x8000_0001).ecx & 1 << 2 != 0;
    __cpuid(1).ecx & 1 << 5 != 0 || has_svm
}

/// The time per iteration of a long run, including exits, if even this time is short enough for a native ring.
fn fast(full: Duration) -> Option<u64> {
    let bound = u64::try_from(full.as_nanos() / u128::from(LOOPS)).ok()?;
    (bound < EMULATED_NS).then_some(bound)
}

/// CPU time of one run of the loop. Unlike elapsed time it does not include other processes of a busy host. Returns
/// `None` if KVM does not behave as expected.
fn run(kvm: &Kvm, cpl: u8, loops: u64) -> Option<Duration> {
    const TABLES: u64 = 0x1000;
    const CODE: u64 = 0x8000;
    // dec rcx; jnz -5; ud2
    const LOOP: [u8; 7] = [0x48, 0xff, 0xc9, 0x75, 0xfb, 0x0f, 0x0b];
    let memory = Memory::anonymous(1 << 20, None).ok()?;
    let put = |at: u64, value: u64| memory.ram.write_obj(value, GuestAddress(at)).ok();
    put(TABLES, (TABLES + 0x1000) | 7)?;
    put(TABLES + 0x1000, (TABLES + 0x2000) | 7)?;
    put(TABLES + 0x2000, (TABLES + 0x3000) | 7)?;
    for page in 0..256 {
        put(TABLES + 0x3000 + page * 8, page << 12 | 7)?;
    }
    memory.ram.write_slice(&LOOP, GuestAddress(CODE)).ok()?;
    let vm = kvm.create_vm().ok()?;
    sys::set_ram(&vm, 0, memory.regions().next()?).ok()?;
    let mut vcpu = vm.create_vcpu(0).ok()?;
    let mut sregs = vcpu.get_sregs().ok()?;
    long_mode(&mut sregs, TABLES, cpl);
    vcpu.set_sregs(&sregs).ok()?;
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rcx: loops,
        rsp: 0x9000,
        rflags: 2,
        ..Default::default()
    })
    .ok()?;
    let start = cpu_time()?;
    loop {
        match vcpu.run() {
            Ok(VcpuExit::Shutdown) => return cpu_time()?.checked_sub(start),
            // A kick: the machine's descriptors signal this thread even during the probe.
            Err(e) if [nix::libc::EINTR, nix::libc::EAGAIN].contains(&e.errno()) => {}
            _ => return None,
        }
    }
}

fn cpu_time() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .ok()
        .map(Duration::from)
}

fn long_mode(sregs: &mut kvm_sregs, cr3: u64, cpl: u8) {
    let selector = |index: u16| index << 3 | u16::from(cpl);
    let flat = |selector, type_, l| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: cpl,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    sregs.cs = flat(selector(6), 0xb, 1);
    sregs.ss = flat(selector(5), 3, 0);
    (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
    sregs.idt.limit = 0;
    sregs.cr0 = 0x8005_0033;
    sregs.cr4 = 0x620;
    sregs.efer = 0xd00;
    sregs.cr3 = cr3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_faster_ring_decides() {
        assert_eq!(classify(Some(1), Some(1)).platform, Some(Platform::Hvm));
        assert_eq!(classify(Some(900), Some(1)).platform, Some(Platform::Ring3));
        assert_eq!(classify(None, Some(1)).platform, Some(Platform::Ring3));
        assert_eq!(classify(Some(900), Some(900)).platform, None);
    }

    #[test]
    fn a_run_is_fast_only_if_its_total_time_is() {
        assert_eq!(fast(Duration::from_micros(30)), Some(30));
        assert_eq!(fast(Duration::from_micros(300)), None);
    }
}
