//! The machine's `unsafe` code: KVM memory slots, the kick, the time-stamp counter, XSAVE state, file descriptors.
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

/// Address of `kvm_run.immediate_exit` of the first vCPU, the one that a kick must stop.
static IMMEDIATE_EXIT: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Length of a file in bytes. Moves the file offset to the end; callers must not rely on the offset. (`File::metadata`
/// uses system calls that can also look up paths, which the seccomp filter forbids.)
pub(crate) fn length(file: &File) -> io::Result<u64> {
    Ok(lseek(file, 0, Whence::SeekEnd)?.cast_unsigned())
}

/// Closes all descriptors except standard input, output and error.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: closing a descriptor needs that no owner uses it later. This is called before the process opens any
    // descriptor other than the three standard ones (`confine`), so every closed descriptor was inherited and has no
    // owner.
    let done = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, 3, u32::MAX, 0) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a file still has a name, that is, has not been deleted. Returns false if the file cannot be examined.
pub(crate) fn has_name(file: &File) -> bool {
    // SAFETY: `fstat` needs an open descriptor and a structure to fill, for which zeros are a valid value; both live
    // until the call returns. It is called by number because the C library's function uses another system call, which
    // can also look up paths and is forbidden.
    unsafe {
        let mut stat: nix::libc::stat = std::mem::zeroed();
        let call = nix::libc::SYS_fstat;
        nix::libc::syscall(call, file.as_raw_fd(), &raw mut stat) == 0 && stat.st_nlink > 0
    }
}

/// Takes an open /dev/kvm. Returns an error if `file` is another file or KVM has another API version.
pub(crate) fn kvm(file: File) -> io::Result<Kvm> {
    // SAFETY: `Kvm` needs a descriptor without another owner and closes it on drop; `into_raw_fd` has given up its
    // ownership. Whether it is /dev/kvm is checked below: the request fails for any other file.
    let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
    match u32::try_from(kvm.get_api_version()) {
        Ok(kvm_bindings::KVM_API_VERSION) => Ok(kvm),
        _ => Err(io::Error::other("it is not KVM with API version 12")),
    }
}

extern "C" fn kick(_: i32, _: *mut nix::libc::siginfo_t, _: *mut nix::libc::c_void) {
    let at = IMMEDIATE_EXIT.load(Ordering::Acquire);
    if !at.is_null() {
        // SAFETY: needs a pointer that is valid for a one-byte store. `aim_kick` stored it from the mapping that the
        // vCPU's descriptor owns, and `VcpuFd` lives until the process exits (the machine is never dropped before).
        unsafe { ptr::write_volatile(at, 1) };
    }
}

/// Installs the handler by which [`KICK_SIGNAL`] ends a running `KVM_RUN`. Before [`aim_kick`] the signal has no
/// effect. SIGALRM, which [`alarm`] raises, has the same handler.
pub(crate) fn install_kick() -> io::Result<()> {
    for signal in [KICK_SIGNAL, nix::libc::SIGALRM] {
        // SAFETY: `sigaction` needs a valid structure, and the handler may only do what is async-signal-safe: it loads
        // an atomic and stores a byte. The structure lives until the call returns, the handler as long as the program.
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

/// Makes kicks end the runs of this vCPU, which must live until the process exits.
pub(crate) fn aim_kick(vcpu: &mut VcpuFd) {
    let at = &raw mut vcpu.get_kvm_run().immediate_exit;
    IMMEDIATE_EXIT.store(at, Ordering::Release);
}

/// Kicks the vCPU every `interval`, which must be below one second; zero stops the timer.
pub(crate) fn alarm(interval: std::time::Duration) {
    let every = nix::libc::timeval {
        tv_sec: 0,
        tv_usec: i64::from(interval.subsec_micros()),
    };
    let timer = nix::libc::itimerval {
        it_interval: every,
        it_value: every,
    };
    // SAFETY: needs a pointer to a valid structure until the call returns; it is a local variable. The call cannot fail
    // with these values.
    unsafe { nix::libc::setitimer(nix::libc::ITIMER_REAL, &raw const timer, ptr::null_mut()) };
}

/// The host's time-stamp counter.
#[must_use]
pub(crate) fn tsc() -> u64 {
    // SAFETY: `rdtsc` needs a CPU that has it. Every x86-64 CPU does, and this program runs on no other.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A CPUID leaf as processes of the host see it.
#[must_use]
pub(crate) fn cpuid(leaf: u32, index: u32) -> core::arch::x86_64::CpuidResult {
    core::arch::x86_64::__cpuid_count(leaf, index)
}

/// Makes `bytes` of this process's memory at `host` a memory slot of a VM.
///
/// # Errors
/// Returns an error if KVM refuses the slot.
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
    // SAFETY: the VM reads and writes these `bytes` at `host` until it is closed. Callers pass a mapping that the
    // machine owns and never unmaps before the process ends, and no Rust reference into it is ever formed.
    unsafe { vm.set_user_memory_region(region) }
}

/// Like [`set_slot`], for a region of guest memory.
///
/// # Errors
/// Returns an error if KVM refuses the slot.
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

/// Loads XSAVE state into a vCPU.
///
/// # Errors
/// Returns an error if KVM refuses the state, for example because its header is invalid.
pub(crate) fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: KVM reads as many bytes as the guest's XSAVE area has. Features beyond the 4096 bytes of `kvm_xsave` have
    // to be enabled by arch_prctl first, which this program does not do.
    unsafe { vcpu.set_xsave(xsave) }
}

/// Makes private copies of the given ranges (offset, bytes) of a private mapping before their first write, by a store
/// to each page that changes nothing. For single pages this is cheaper than MADV_POPULATE_WRITE, and it costs next to
/// nothing for pages that are already copied. Ranges must be whole pages. At the first range that is not inside the
/// mapping, the function returns and leaves out the ranges that follow.
pub(crate) fn touch(mapping: &MmapRegion<()>, ranges: impl Iterator<Item = (usize, usize)>) {
    for (offset, bytes) in ranges {
        let Some(end) = offset.checked_add(bytes) else {
            return;
        };
        if end > mapping.size() {
            return;
        }
        for page in (offset..end).step_by(4096) {
            // SAFETY: needs an address in a writable mapping of this process: checked above against its size. The store
            // is atomic and writes the current value, so no reader or writer of the page can notice it. (It is assembly
            // because a compiler may remove an atomic operation that changes nothing.)
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

/// Replaces `bytes` bytes at offset `at` of a private mapping by a private mapping of `file` from offset `stored` on.
/// All three numbers must be multiples of the page size. The file must contain the whole range: an access beyond its
/// end raises SIGBUS. The VM must not exist yet.
///
/// # Errors
/// Returns [`io::ErrorKind::InvalidInput`] for a range outside the mapping, and an error if mmap(2) fails.
pub(crate) fn map_over(
    mapping: &MmapRegion<()>,
    at: usize,
    bytes: usize,
    (file, stored): (&File, i64),
) -> io::Result<()> {
    if at.checked_add(bytes).is_none_or(|end| end > mapping.size()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: needs that the replaced range holds nothing but guest memory, and that no code relies on its content. It
    // lies inside a mapping of this process: checked above against its size. No reference into guest memory is ever
    // formed, the VM does not exist yet, and `MmapRegion` unmaps the whole range on drop, whatever pieces it consists
    // of.
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
