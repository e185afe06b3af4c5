//! The system calls that need `unsafe`: starting programs, ioctls, reaping children, waiting for signals, random bytes,
//! and process-wide settings.
#![expect(
    unsafe_code,
    reason = "clone with a shared address space and ioctls have no safe wrapper"
)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
    sys::{
        signal::{Signal, kill},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
    unistd::Pid,
};

/// Changes settings of the whole process, once at its start.
pub(crate) fn prepare_process() {
    // SAFETY: changing a disposition requires that no other code relies on the previous one. This runs first in the
    // only thread, before any handler is installed. Holds for the process's life; children reset it.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    // SAFETY: mallopt must be called before other threads allocate; there is only ever one thread.
    // The heap's top is returned only above 1 MiB, so that a request's buffers need no `brk`; larger buffers are mapped
    // and unmapped, so that a large request leaves no large heap.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    };
    // SAFETY: marking descriptors close-on-exec requires that no code relies on inheriting them. Descriptors above the
    // standard streams came from this process's parent and are not used here. Holds for the process's life.
    unsafe { libc::close_range(3, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
    // SAFETY: umask touches no memory; it replaces a number of this process. Holds for the process's life.
    unsafe { libc::umask(0o022) };
}

/// `CLOSE_RANGE_CLOEXEC` of linux/close_range.h.
const CLOSE_RANGE_CLOEXEC: c_int = 1 << 2;

/// User and groups of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) uid: u32,
    /// The primary group.
    pub(crate) gid: u32,
    /// All groups, including the primary one.
    pub(crate) groups: Vec<u32>,
}

/// A program to start.
pub(crate) struct SpawnPlan<'a> {
    /// Paths to try, in this order; at least one.
    pub(crate) programs: &'a [CString],
    /// Arguments, beginning with the program's name.
    pub(crate) arguments: &'a [CString],
    /// `NAME=value`.
    pub(crate) environment: &'a [CString],
    /// Working directory, entered with the user's permissions.
    pub(crate) cwd: &'a CStr,
    /// Standard streams; their descriptors must be above 2.
    pub(crate) stdio: StandardStreams<'a>,
    /// `None` keeps the agent's user.
    pub(crate) credentials: Option<&'a Credentials>,
}

/// Standard input, output and error.
pub(crate) enum StandardStreams<'a> {
    /// One descriptor each.
    Separate([BorrowedFd<'a>; 3]),
    /// All three are this terminal, which becomes the session's controlling terminal.
    Terminal(BorrowedFd<'a>),
}

/// The step at which a start failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpawnStep {
    /// Creating the process.
    Clone,
    /// Creating its session or attaching its standard streams.
    Prepare,
    /// Switching to the user.
    User,
    /// Entering the working directory.
    Cwd,
    /// Running the program.
    Exec,
}

/// A failed start, which leaves no process behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpawnError {
    pub(crate) step: SpawnStep,
    pub(crate) errno: Errno,
}

/// Starts programs without copying the agent's page tables: the child shares the agent's memory until execve, and
/// the agent is suspended until then (`CLONE_VM | CLONE_VFORK`).
pub(crate) struct Spawner {
    /// Soft and hard limit on the descriptors of started programs.
    files: libc::rlimit,
    /// The child's stack until execve: 64 KiB, of which it touches one or two pages.
    stack: Vec<u128>,
}

/// Input of the child. Raw pointers, because the child must not allocate, lock or unwind.
struct ChildTask {
    programs: *const *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    cwd: *const c_char,
    stdio: [RawFd; 3],
    terminal: bool,
    uid: u32,
    gid: u32,
    groups: *const u32,
    group_count: usize,
    switch_user: bool,
    files: libc::rlimit,
    failed: SpawnStep,
    errno: c_int,
}

const STACK_WORDS: usize = (64 << 10) / size_of::<u128>();

impl Spawner {
    /// `files` is the soft and hard limit of descriptors of started programs.
    pub(crate) fn new(files: (u64, u64)) -> Self {
        Self {
            files: libc::rlimit {
                rlim_cur: files.0,
                rlim_max: files.1,
            },
            stack: vec![0; STACK_WORDS],
        }
    }

    /// Starts a program as leader of a new session. Returns its PID.
    pub(crate) fn spawn(&mut self, plan: &SpawnPlan<'_>) -> Result<i32, SpawnError> {
        let programs = pointers(plan.programs);
        let arguments = pointers(plan.arguments);
        let environment = pointers(plan.environment);
        let credentials = plan.credentials;
        let groups = credentials.map_or(&[][..], |c| &c.groups);
        let mut task = ChildTask {
            programs: programs.as_ptr(),
            arguments: arguments.as_ptr(),
            environment: environment.as_ptr(),
            cwd: plan.cwd.as_ptr(),
            stdio: match &plan.stdio {
                StandardStreams::Separate(fds) => fds.map(|fd| fd.as_raw_fd()),
                StandardStreams::Terminal(fd) => [fd.as_raw_fd(); 3],
            },
            terminal: matches!(plan.stdio, StandardStreams::Terminal(_)),
            uid: credentials.map_or(0, |c| c.uid),
            gid: credentials.map_or(0, |c| c.gid),
            groups: groups.as_ptr(),
            group_count: groups.len(),
            switch_user: credentials.is_some(),
            files: self.files,
            failed: SpawnStep::Clone,
            errno: 0,
        };
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let top = self.stack.as_mut_ptr_range().end.cast::<c_void>();
        // SAFETY: `clone` requires the top of an unused, 16-byte aligned stack, and a task that outlives the child's
        // use of it. The stack belongs to this spawner alone (`&mut self`) and consists of 16-byte words. With
        // CLONE_VFORK this thread is suspended until the child calls execve or exits, so `task`, the pointer arrays and
        // their targets, which live to the end of this function, outlive that. `child` only makes system calls and
        // writes to `task`.
        let pid = unsafe { libc::clone(child, top, flags, (&raw mut task).cast::<c_void>()) };
        if pid < 0 {
            let step = SpawnStep::Clone;
            return Err(SpawnError {
                step,
                errno: Errno::last(),
            });
        }
        // SAFETY: a volatile read requires a valid, initialised place. `task` is a live local, and the child that may
        // have written to it is past execve or exit. Volatile, because the compiler cannot see that write. For this
        // statement only.
        let (step, errno) = unsafe {
            (
                ptr::read_volatile(&raw const task.failed),
                ptr::read_volatile(&raw const task.errno),
            )
        };
        match errno {
            0 => Ok(pid),
            errno => {
                // The child has exited already; this reaps it.
                let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), None);
                Err(SpawnError {
                    step,
                    errno: Errno::from_raw(errno),
                })
            }
        }
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    let end = [ptr::null()];
    strings.iter().map(|s| s.as_ptr()).chain(end).collect()
}

/// The child between `clone` and `execve`. Returns only to report a failure.
extern "C" fn child(task: *mut c_void) -> c_int {
    let task = task.cast::<ChildTask>();
    // SAFETY: requires a valid task without other references. `spawn` passes its local and is suspended until this
    // process has left the shared memory. Until then.
    let task = unsafe { &mut *task };
    // SAFETY: `become_program` requires a task of `spawn`; this is one. Until execve.
    let (failed, errno) = unsafe { become_program(task) };
    // SAFETY: a volatile write requires a valid place; `task` is one, as above. Volatile, because the compiler cannot
    // see that the parent reads it. For this statement only.
    unsafe {
        ptr::write_volatile(&raw mut task.failed, failed);
        ptr::write_volatile(&raw mut task.errno, errno);
    }
    127
}

/// The last errno, never zero.
fn last_errno() -> c_int {
    Errno::last_raw().max(1)
}

/// Prepares the process and executes the program. Returns the failed step and its errno.
///
/// # Safety
/// Must run in a child that [`Spawner::spawn`] has created, with that call's task.
unsafe fn become_program(task: &ChildTask) -> (SpawnStep, c_int) {
    // SAFETY: these calls require valid pointers and descriptors, and may only change state of this process. The task's
    // pointers refer to null-terminated arrays and strings that live in `spawn`; `mask` and `default` are locals.
    // Signal dispositions and mask, descriptors, their limit, session and working directory are the child's own,
    // because `clone` was called without the flags that share them. User and groups are set by raw system calls: the C
    // library's wrappers would signal the parent's threads. Until execve.
    unsafe {
        let mut mask = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut mask);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const mask, ptr::null_mut());
        if libc::setsid() < 0 {
            return (SpawnStep::Prepare, last_errno());
        }
        for (target, fd) in (0..).zip(task.stdio) {
            if libc::dup2(fd, target) < 0 {
                return (SpawnStep::Prepare, last_errno());
            }
        }
        if task.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (SpawnStep::Prepare, last_errno());
        }
        // On failure the program runs with the agent's limit.
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const task.files);
        if task.switch_user {
            let groups = libc::syscall(libc::SYS_setgroups, task.group_count, task.groups);
            if groups < 0
                || libc::syscall(libc::SYS_setgid, task.gid) < 0
                || libc::syscall(libc::SYS_setuid, task.uid) < 0
            {
                return (SpawnStep::User, last_errno());
            }
        }
        if libc::chdir(task.cwd) < 0 {
            return (SpawnStep::Cwd, last_errno());
        }
        let (mut program, mut worst) = (task.programs, libc::ENOENT);
        while !(*program).is_null() {
            libc::execve(*program, task.arguments, task.environment);
            match last_errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                // As in a shell, a later path may still succeed; otherwise this is the error.
                libc::EACCES => worst = libc::EACCES,
                errno => return (SpawnStep::Exec, errno),
            }
            program = program.add(1);
        }
        (SpawnStep::Exec, worst)
    }
}

/// Largest number of random bytes in one call of [`reseed_kernel`].
pub(crate) const MAX_ENTROPY: usize = 512;

/// `struct rand_pool_info` (linux/random.h) with room for [`MAX_ENTROPY`] bytes.
#[repr(C)]
struct PoolInfo {
    entropy_bits: c_int,
    size: c_int,
    bytes: [u8; MAX_ENTROPY],
}

/// `RNDADDENTROPY`, `_IOW('R', 3, int[2])` of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `RNDRESEEDCRNG`, `_IO('R', 7)` of linux/random.h.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// `EXT4_IOC_RESIZE_FS`, `_IOW('f', 16, u64)` of linux/ext4.h.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;
/// `FIFREEZE`, `_IOWR('X', 119, int)` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;

/// Adds random bytes to the kernel's pool, credits all of them, and makes the generator derive a new key from the pool
/// at once (random(4)). `pool` must be /dev/urandom. More than [`MAX_ENTROPY`] bytes are an error.
pub(crate) fn reseed_kernel(pool: BorrowedFd<'_>, bytes: &[u8]) -> Result<(), Errno> {
    let mut info = PoolInfo {
        entropy_bits: 0,
        size: 0,
        bytes: [0; MAX_ENTROPY],
    };
    let place = info.bytes.get_mut(..bytes.len()).ok_or(Errno::E2BIG)?;
    place.copy_from_slice(bytes);
    info.size = c_int::try_from(bytes.len()).map_err(|_| Errno::E2BIG)?;
    info.entropy_bits = info.size * 8;
    // SAFETY: the request reads a `rand_pool_info` with `size` bytes of data. `info` has C's layout, and `size` is at
    // most the length of its array. For the call only.
    Errno::result(unsafe { libc::ioctl(pool.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    // SAFETY: the request takes no argument, so no pointer must stay valid.
    Errno::result(unsafe { libc::ioctl(pool.as_raw_fd(), RNDRESEEDCRNG) })?;
    Ok(())
}

/// `FITHAW`, `_IOWR('X', 120, int)` of linux/fs.h.
const FITHAW: libc::c_ulong = 0xc004_5878;

/// Freezes a file system: writes back its journal and blocks further changes, so that the file system is clean when the
/// power goes off.
pub(crate) fn freeze(dir: BorrowedFd<'_>) -> Result<(), Errno> {
    freeze_or_thaw(dir, FIFREEZE)
}

/// Ends [`freeze`]. `EINVAL`: the file system is not frozen.
pub(crate) fn thaw(dir: BorrowedFd<'_>) -> Result<(), Errno> {
    freeze_or_thaw(dir, FITHAW)
}

fn freeze_or_thaw(dir: BorrowedFd<'_>, request: libc::c_ulong) -> Result<(), Errno> {
    let unused: c_int = 0;
    // SAFETY: both requests read at most an int; the argument points to one. For the call only.
    Errno::result(unsafe { libc::ioctl(dir.as_raw_fd(), request, &raw const unused) })?;
    Ok(())
}

/// Starts a process that stops all other processes, freezes a file system, sends the result ([`freezer_result`]),
/// and waits until the returned socket is closed or `limit` has passed. Then it thaws the file system, continues
/// the processes and exits. It holds no other descriptor. Returns its PID and the socket.
///
/// A program that holds a write open, such as splice(2) from an empty pipe, would block the freeze, and the freeze
/// would block all other writers. A signal interrupts such a program.
pub(crate) fn start_freezer(dir: BorrowedFd<'_>, limit: Duration) -> Result<(i32, OwnedFd), Errno> {
    let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
    let (own, other) = socketpair(family, kind, None, SockFlag::SOCK_CLOEXEC)?;
    // SAFETY: after fork(2) in a process with several threads, the child may only make system calls. This process has
    // one thread, and the child makes only system calls: it does not return from this block. The pointers are to its
    // locals, for each call only.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::dup2(dir.as_raw_fd(), 0);
            libc::dup2(other.as_raw_fd(), 1);
            libc::close_range(2, libc::c_uint::MAX, 0);
            libc::kill(-1, libc::SIGSTOP);
            let frozen = freeze(BorrowedFd::borrow_raw(0));
            let result = frozen.map_or_else(|errno| errno as c_int, |()| 0);
            libc::write(1, (&raw const result).cast(), size_of::<c_int>());
            let mut end = libc::pollfd {
                fd: 1,
                events: libc::POLLIN,
                revents: 0,
            };
            let limit = c_int::try_from(limit.as_millis()).unwrap_or(c_int::MAX);
            libc::poll(&raw mut end, 1, limit);
            let _ = thaw(BorrowedFd::borrow_raw(0));
            libc::kill(-1, libc::SIGCONT);
            libc::_exit(0);
        }
        Ok((Errno::result(pid)?, own))
    }
}

/// Result sent by the freezer. `None`: none yet, after waiting for this time.
pub(crate) fn freezer_result(socket: &OwnedFd, wait: Duration) -> Option<Result<(), Errno>> {
    let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let wait = u16::try_from(wait.as_millis()).unwrap_or(u16::MAX);
    match poll(&mut ready, wait) {
        Ok(0) | Err(Errno::EINTR) => return None,
        Ok(_) => {}
        Err(errno) => return Some(Err(errno)),
    }
    let mut result = [0; size_of::<c_int>()];
    match nix::unistd::read(socket, &mut result) {
        Ok(n) if n == result.len() => match c_int::from_ne_bytes(result) {
            // EBUSY: a program in the guest has frozen it.
            0 | libc::EBUSY => Some(Ok(())),
            errno => Some(Err(Errno::from_raw(errno))),
        },
        // The freezer was killed.
        Ok(_) => Some(Err(Errno::ECHILD)),
        Err(errno) => Some(Err(errno)),
    }
}

/// Continues all stopped processes.
pub(crate) fn continue_all() {
    // Fails if there is no other process.
    let _ = kill(Pid::from_raw(-1), Signal::SIGCONT);
}

/// Grows a mounted ext4 file system to `blocks` blocks.
pub(crate) fn resize(dir: BorrowedFd<'_>, blocks: u64) -> Result<(), Errno> {
    // SAFETY: the request reads a u64; the argument points to a live local. For the call only.
    Errno::result(unsafe { libc::ioctl(dir.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) })?;
    Ok(())
}

/// Sets a terminal's size in characters (ioctl_tty(2)).
pub(crate) fn set_window_size(terminal: BorrowedFd<'_>, rows: u16, cols: u16) -> Result<(), Errno> {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the request reads a `winsize`; the argument points to a live local with C's layout. For the call only.
    Errno::result(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })?;
    Ok(())
}

/// Sets a network interface up (netdevice(7)). The kernel assigns the addresses of the loopback interface.
pub(crate) fn interface_up(socket: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    // SAFETY: `ifreq` is plain data for which all zeros is a valid value, at any time.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return Err(Errno::ENAMETOOLONG);
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = c_char::from_ne_bytes([*byte]);
    }
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the request reads the name and writes the flags of an `ifreq`; both are in the live local. For the call
    // only.
    Errno::result(unsafe { libc::ioctl(fd, libc::SIOCGIFFLAGS, &raw mut request) })?;
    // SAFETY: the kernel has just written this member of the union. For this statement only.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: the request reads name and flags of the live local and writes nothing. For the call only.
    Errno::result(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const request) })?;
    Ok(())
}

/// Makes orphaned descendants children of this process, as they are of PID 1.
pub(crate) fn adopt_orphans() -> Result<(), Errno> {
    // SAFETY: this option takes one number and touches no memory. Holds for the process's life.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })?;
    Ok(())
}

/// Reaps a dead child: its PID and wait status (waitpid(2)). `None` if no child is dead. `nix` fails on statuses with
/// real-time signals, hence the raw call.
pub(crate) fn reap() -> Result<Option<(i32, c_int)>, Errno> {
    let mut status = 0;
    // SAFETY: the call writes one int to a live local. For the call only.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = Errno::result(pid)?;
    Ok((pid > 0).then_some((pid, status)))
}

/// Random bytes of the kernel (getrandom(2)).
pub(crate) fn random_bytes() -> Result<[u8; 16], Errno> {
    let mut bytes = [0_u8; 16];
    // SAFETY: the call writes at most the given length, which is that of a live local. For the call only.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast::<c_void>(), bytes.len(), 0) };
    match Errno::result(n)? {
        16 => Ok(bytes),
        _ => Err(Errno::EIO),
    }
}

/// Waits for one of a set of blocked signals; false if none arrived in time.
pub(crate) fn wait_for(signals: &nix::sys::signal::SigSet, within: std::time::Duration) -> bool {
    let time = nix::sys::time::TimeSpec::from_duration(within);
    // SAFETY: the call reads a signal set and a timeout, which are live locals, and writes nothing, because the second
    // pointer is null. For the call only.
    let signal = unsafe { libc::sigtimedwait(signals.as_ref(), ptr::null_mut(), time.as_ref()) };
    signal > 0
}
