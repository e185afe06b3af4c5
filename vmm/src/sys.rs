//! The unsafe steps of the machine: memory slots, the kick, the time-stamp counter, XSAVE state.
#![expect(
    unsafe_code,
    reason = "system calls and CPU instructions without a safe wrapper"
)]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, IntoRawFd},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use kvm_bindings::{kvm_userspace_memory_region, kvm_xsave};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use nix::unistd::{Whence, lseek};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::watch::KICK_SIGNAL;

/// `kvm_run.immediate_exit` of this process's one vCPU that may have to leave the guest.
static IMMEDIATE_EXIT: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Length of a file in bytes. `File::metadata` would do, but its system calls look up paths as well and are not
/// allowed; the offset that this moves is used by nobody.
pub(crate) fn length(file: &File) -> io::Result<u64> {
    Ok(lseek(file, 0, Whence::SeekEnd)?.cast_unsigned())
}

/// Closes all descriptors but the first three: what whoever started this process had open is not this VM's.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: closing a descriptor needs that nobody owns it who uses it later. This is called before anything
    // but the three standard descriptors is opened (`confine`), so what is closed was inherited and has no owner.
    let done = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, 3, u32::MAX, 0) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a file has a name still.
pub(crate) fn has_name(file: &File) -> bool {
    // SAFETY: `fstat` needs an open descriptor and room for the structure that it fills, of which zeros are a
    // value; both live as long as the call. It is called by number because the C library's function makes another
    // system call, which looks up paths as well and is not allowed.
    unsafe {
        let mut stat: nix::libc::stat = std::mem::zeroed();
        let call = nix::libc::SYS_fstat;
        nix::libc::syscall(call, file.as_raw_fd(), &raw mut stat) == 0 && stat.st_nlink > 0
    }
}

/// KVM behind an open /dev/kvm.
pub(crate) fn kvm(file: File) -> io::Result<Kvm> {
    // SAFETY: `Kvm` needs a descriptor that nobody else owns and closes it when it is dropped; `into_raw_fd` has
    // given this one up. That it is /dev/kvm is checked below: of any other file the request below fails.
    let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
    match u32::try_from(kvm.get_api_version()) {
        Ok(kvm_bindings::KVM_API_VERSION) => Ok(kvm),
        _ => Err(io::Error::other("it is not KVM of API version 12")),
    }
}

extern "C" fn kick(_: i32, _: *mut nix::libc::siginfo_t, _: *mut nix::libc::c_void) {
    let at = IMMEDIATE_EXIT.load(Ordering::Acquire);
    if !at.is_null() {
        // SAFETY: needs a pointer valid for a one-byte store. `aim_kick` stored it from the mapping that
        // the vCPU's descriptor owns, and `VcpuFd` lives until the process exits (the machine is never
        // dropped before).
        unsafe { ptr::write_volatile(at, 1) };
    }
}

/// Installs the handler that makes [`KICK_SIGNAL`] end a running `KVM_RUN`; before a vCPU is aimed at, the
/// signal does nothing. SIGALRM, by which [`alarm`] polls, is handled alike.
pub(crate) fn install_kick() -> io::Result<()> {
    for signal in [KICK_SIGNAL, nix::libc::SIGALRM] {
        // SAFETY: `sigaction` needs a valid structure, and the handler may only do what is safe in a
        // signal: it loads an atomic and stores a byte. Handler and structure live as long as the program
        // and the call.
        let done = unsafe {
            let mut action: nix::libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = kick as *const () as usize;
            action.sa_flags = nix::libc::SA_SIGINFO;
            nix::libc::sigaction(signal, &raw const action, ptr::null_mut())
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Makes the kick end this vCPU's runs.
pub(crate) fn aim_kick(vcpu: &mut VcpuFd) {
    let at = &raw mut vcpu.get_kvm_run().immediate_exit;
    IMMEDIATE_EXIT.store(at, Ordering::Release);
}

/// Kicks every `interval` from now on; zero stops.
pub(crate) fn alarm(interval: std::time::Duration) {
    let every = nix::libc::timeval {
        tv_sec: 0,
        tv_usec: i64::from(interval.subsec_micros()),
    };
    let timer = nix::libc::itimerval {
        it_interval: every,
        it_value: every,
    };
    // SAFETY: needs a pointer to a valid structure for the time of the call; it is a local.
    // The call cannot fail with these values.
    unsafe { nix::libc::setitimer(nix::libc::ITIMER_REAL, &raw const timer, ptr::null_mut()) };
}

/// Time-stamp counter of the host.
#[must_use]
pub(crate) fn tsc() -> u64 {
    // SAFETY: `rdtsc` needs a CPU that has it; every x86-64 CPU does, and this program runs on no other.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A leaf of CPUID as this host's programs see it.
#[must_use]
pub(crate) fn cpuid(leaf: u32, index: u32) -> core::arch::x86_64::CpuidResult {
    core::arch::x86_64::__cpuid_count(leaf, index)
}

/// Makes a mapping of this process the memory of a VM.
///
/// # Errors
/// KVM's.
pub(crate) fn set_slot(
    vm: &VmFd,
    slot: u32,
    gpa: u64,
    host: *mut u8,
    bytes: u64,
    flags: u32,
) -> Result<(), kvm_ioctls::Error> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: bytes,
        userspace_addr: host as u64,
    };
    // SAFETY: the VM will read and write these `bytes` at `host` until it is closed. Callers pass a
    // mapping that the machine owns and never unmaps before the process ends, and no Rust reference into
    // it is ever formed.
    unsafe { vm.set_user_memory_region(region) }
}

/// As [`set_slot`], for one of the regions of guest memory.
///
/// # Errors
/// KVM's.
pub(crate) fn set_ram(
    vm: &VmFd,
    slot: u32,
    region: &GuestRegionMmap<()>,
) -> Result<(), kvm_ioctls::Error> {
    let mapping: &MmapRegion<()> = region;
    set_slot(
        vm,
        slot,
        region.start_addr().0,
        mapping.as_ptr(),
        region.len(),
        0,
    )
}

/// Loads XSAVE state.
///
/// # Errors
/// KVM's: a header that the CPU refuses.
pub(crate) fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: KVM reads as many bytes as the XSAVE area of the guest has. Features beyond the 4096 bytes
    // of `kvm_xsave` have to be enabled by arch_prctl first, which this program does not do.
    unsafe { vcpu.set_xsave(xsave) }
}

/// Copies the given ranges (offset, bytes) of a private mapping ahead of their first store, by a store to each
/// page that changes nothing: cheaper for single pages than MADV_POPULATE_WRITE, and free for those that are
/// copied already. Ranges are whole pages; from the first that is not inside the mapping on they are ignored.
pub(crate) fn touch(mapping: &MmapRegion<()>, ranges: impl Iterator<Item = (usize, usize)>) {
    for (offset, bytes) in ranges {
        let Some(end) = offset.checked_add(bytes) else {
            return;
        };
        if end > mapping.size() {
            return;
        }
        for page in (offset..end).step_by(4096) {
            // SAFETY: needs an address in a writable mapping of ours: checked above against its size. The
            // store is atomic and writes what is there, so nothing that reads or writes the page can notice.
            // (In assembly, since a compiler may leave out an atomic operation that changes nothing.)
            unsafe {
                core::arch::asm!(
                    "lock or byte ptr [{at}], 0",
                    at = in(reg) mapping.as_ptr().add(page),
                    options(nostack),
                );
            }
        }
    }
}

/// Puts a private mapping of `bytes` of a file from `stored` on in place of what is at `at` of a private
/// mapping. All three are whole pages; the file must be as long, or touching the rest is SIGBUS.
///
/// # Errors
/// A range that is not inside the mapping, or the system's.
pub(crate) fn map_over(
    mapping: &MmapRegion<()>,
    at: usize,
    bytes: usize,
    (file, stored): (&File, i64),
) -> io::Result<()> {
    if at.checked_add(bytes).is_none_or(|end| end > mapping.size()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: needs that nothing but guest memory lies in the range that is replaced, and that nobody
    // relies on what was there. It lies inside a mapping of ours: checked above against its size. No
    // reference into guest memory is ever formed, the VM whose memory it becomes is not made yet, and
    // `MmapRegion` unmaps the whole range when it is dropped, whatever pieces it has then.
    let mapped = unsafe {
        nix::libc::mmap(
            mapping.as_ptr().add(at).cast(),
            bytes,
            nix::libc::PROT_READ | nix::libc::PROT_WRITE,
            nix::libc::MAP_PRIVATE | nix::libc::MAP_FIXED | nix::libc::MAP_NORESERVE,
            file.as_raw_fd(),
            stored,
        )
    };
    if mapped == nix::libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
