//! The MSRs of a snapshot.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

use super::error::{HvmError, kvm};

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
const MSR_TSX_CTRL: u32 = 0x122;
const MSR_AMD_TSC_RATIO: u32 = 0xc000_0104;
pub(super) const MSR_MISC_ENABLE: u32 = 0x1a0;
pub(super) const MSR_MTRR_DEFAULT: u32 = 0x2ff;
/// Limit on MSRs per call; longer lists are split.
const MSR_BATCH: usize = 128;

/// Whether a snapshot may contain an MSR. Excluded are MSRs that describe the CPU (ARCH_CAPABILITIES,
/// PERF_CAPABILITIES, the VMX capabilities) and MSRs of the Hyper-V interface, which guests do not have.
pub(super) fn is_allowed(index: u32) -> bool {
    !matches!(index, 0x10a | 0x345 | 0x480..=0x4ff | 0x4000_0000..=0x4000_01ff)
}

/// Whether KVM derives an MSR from CPUID: TSX_CTRL disables the hidden RTM, and the TSC ratio belongs to nested guests.
/// Both can have values that other CPUs refuse, so they are neither saved nor set. Snapshots of earlier releases
/// contain them.
fn is_derived(index: u32) -> bool {
    matches!(index, MSR_TSX_CTRL | MSR_AMD_TSC_RATIO)
}

/// The MSRs of this KVM that a snapshot contains.
pub(super) fn listed(kvm_fd: &Kvm) -> Result<Vec<u32>, HvmError> {
    let list = kvm_fd
        .get_msr_index_list()
        .map_err(kvm("list MSRs"))?
        .as_slice()
        .to_vec();
    let saved = |index: &u32| is_allowed(*index) && !is_derived(*index);
    let mut list: Vec<u32> = list.into_iter().filter(saved).collect();
    // Older kernels do not list this MSR, but it decides whether memory is cached.
    if !list.contains(&MSR_MTRR_DEFAULT) {
        list.push(MSR_MTRR_DEFAULT);
    }
    Ok(list)
}

/// Reads the readable MSRs of `list`. KVM also lists some that a guest with this CPUID does not have.
pub(super) fn get(vcpu: &VcpuFd, list: &[u32]) -> Result<Vec<(u32, u64)>, HvmError> {
    let mut found = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(MSR_BATCH)];
        let wanted: Vec<_> = batch.iter().map(|index| entry(*index, 0)).collect();
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| HvmError::State("too many MSRs"))?;
        let n = vcpu.get_msrs(&mut msrs).map_err(kvm("read MSRs"))?;
        found.extend(msrs.as_slice()[..n].iter().map(|m| (m.index, m.data)));
        // KVM stops at the first MSR that it cannot read; skip it.
        rest = &rest[(n + 1).min(batch.len()).max(n)..];
    }
    Ok(found)
}

/// Sets MSRs. Returns the first one that this CPU lacks.
pub(super) fn set(
    vcpu: &VcpuFd,
    pairs: &[(u32, u64)],
    listed: &[u32],
) -> Result<Option<(u32, u64)>, HvmError> {
    set_by(pairs, listed, |batch| {
        let entries: Vec<_> = batch.iter().map(|(i, data)| entry(*i, *data)).collect();
        let msrs = Msrs::from_entries(&entries).map_err(|_| HvmError::State("too many MSRs"))?;
        vcpu.set_msrs(&msrs).map_err(kvm("set MSRs"))
    })
}

/// Sets MSRs with `write`, which returns the number of MSRs that were set before the first refused one. An MSR is
/// skipped if it is zero and this KVM does not list it: the guest has never used it, and its CPUID has no feature that
/// this CPU lacks. KVM lists MSRs by the host's CPU, for example the MSRs of MPX or of each performance counter.
pub(super) fn set_by(
    pairs: &[(u32, u64)],
    listed: &[u32],
    mut write: impl FnMut(&[(u32, u64)]) -> Result<usize, HvmError>,
) -> Result<Option<(u32, u64)>, HvmError> {
    let mut rest = pairs;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(MSR_BATCH)];
        let n = write(batch)?.min(batch.len());
        match batch.get(n) {
            None => rest = &rest[n..],
            Some((index, 0)) if !listed.contains(index) => rest = &rest[n + 1..],
            Some(refused) => return Ok(Some(*refused)),
        }
    }
    Ok(None)
}

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

/// Orders the MSRs of a snapshot: first the TSC, last the TSC deadline, which refers to the TSC. A saved deadline of zero
/// can mean that the timer has just expired. Its interrupt must not be lost, and an additional interrupt is harmless, so
/// the timer is set to fire at once.
pub(super) fn ordered(msrs: &[(u32, u64)]) -> Vec<(u32, u64)> {
    let value = |index| msrs.iter().find(|(i, _)| *i == index).map(|m| m.1);
    let tsc = value(MSR_TSC);
    let deadline = value(MSR_TSC_DEADLINE).map(|at| match at {
        0 => tsc.unwrap_or(1),
        at => at,
    });
    let others = msrs.iter().copied();
    let others =
        others.filter(|(i, _)| ![MSR_TSC, MSR_TSC_DEADLINE].contains(i) && !is_derived(*i));
    tsc.map(|v| (MSR_TSC, v))
        .into_iter()
        .chain(others)
        .chain(deadline.map(|v| (MSR_TSC_DEADLINE, v)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A CPU that has `msrs`.
    fn cpu(msrs: &[u32]) -> impl FnMut(&[(u32, u64)]) -> Result<usize, HvmError> {
        |batch| {
            let refused = batch.iter().position(|(index, _)| !msrs.contains(index));
            Ok(refused.unwrap_or(batch.len()))
        }
    }

    #[test]
    fn an_msr_that_the_cpu_lacks_is_skipped_only_if_it_is_zero() {
        let has = [1, 2, 3];
        let set = |pairs: &[(u32, u64)]| set_by(pairs, &has, cpu(&has)).unwrap();
        assert_eq!(set(&[(1, 5), (9, 0), (2, 0), (8, 0)]), None);
        assert_eq!(set(&[(9, 0), (1, 5), (8, 7), (7, 7)]), Some((8, 7)));
        // KVM lists the MSR but refuses zero: the CPU has it, and the value is wrong.
        assert_eq!(set_by(&[(4, 0)], &[4], cpu(&has)).unwrap(), Some((4, 0)));
    }

    #[test]
    fn all_msrs_of_a_long_list_are_set() {
        let pairs: Vec<_> = (0..300).map(|i| (i, u64::from(i % 3))).collect();
        let has: Vec<u32> = (0..300).filter(|i| i % 3 > 0).collect();
        let mut done = Vec::new();
        let mut cpu = cpu(&has);
        let refused = set_by(&pairs, &has, |batch| {
            let n = cpu(batch)?;
            done.extend(batch[..n].iter().map(|(index, _)| *index));
            Ok(n)
        });
        assert_eq!(refused.unwrap(), None);
        assert_eq!(done, has);
    }

    #[test]
    fn the_tsc_is_set_first_and_its_deadline_last() {
        let saved = [
            (MSR_TSC_DEADLINE, 0),
            (0x174, 4),
            (MSR_TSX_CTRL, 1),
            (MSR_TSC, 9),
        ];
        let expected = [(MSR_TSC, 9), (0x174, 4), (MSR_TSC_DEADLINE, 9)];
        assert_eq!(ordered(&saved), expected);
    }
}
