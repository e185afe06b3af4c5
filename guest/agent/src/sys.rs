//! The system calls that need `unsafe`: starting programs, the random pool, freezing a file system, and three
//! process-wide settings.
#![expect(
    unsafe_code,
    reason = "clone with a shared address space and ioctls have no safe wrapper"
)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    ptr,
};

use nix::errno::Errno;

/// Settings for the whole process, made once at its start.
pub(crate) fn prepare_process() {
    // SAFETY: changing a disposition needs that no other code relies on the former one. This runs first
    // in the only thread, nothing has installed a handler. Holds for ever; children reset it.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    // SAFETY: mallopt needs to be called before other threads allocate; there is one thread, always.
    // Heap top is given back only above 1 MiB, so that a request's buffers come and go without `brk`,
    // and larger buffers are mapped and unmapped, so that one large request leaves no large heap.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
    };
    // SAFETY: marking descriptors needs that nobody relies on handing them down. Those above the standard
    // streams came from whoever started this process, and nothing here knows of them. Holds for ever.
    unsafe { libc::close_range(3, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
    // SAFETY: umask only replaces a number of this process. Holds for ever.
    unsafe { libc::umask(0o022) };
}

/// `CLOSE_RANGE_CLOEXEC` of linux/close_range.h.
const CLOSE_RANGE_CLOEXEC: c_int = 1 << 2;

/// What a program is started as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// User id.
    pub(crate) uid: u32,
    /// Primary group.
    pub(crate) gid: u32,
    /// All groups.
    pub(crate) groups: Vec<u32>,
}

/// A program to start, everything decided.
pub(crate) struct SpawnPlan<'a> {
    /// Paths to try in this order; at least one.
    pub(crate) programs: &'a [CString],
    /// Arguments, the program's name first.
    pub(crate) arguments: &'a [CString],
    /// `NAME=value`.
    pub(crate) environment: &'a [CString],
    /// Entered after the user was switched, so that its rights count.
    pub(crate) cwd: &'a CStr,
    /// What it reads and writes; descriptors above 2.
    pub(crate) stdio: StandardStreams<'a>,
    /// Absent means to stay who the agent is.
    pub(crate) credentials: Option<&'a Credentials>,
}

/// Standard input, output and error.
pub(crate) enum StandardStreams<'a> {
    /// One each.
    Separate([BorrowedFd<'a>; 3]),
    /// All three are this terminal, which becomes the session's.
    Terminal(BorrowedFd<'a>),
}

/// What a new process was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpawnStep {
    /// The process was not made at all.
    Clone,
    /// Its session or standard streams.
    Prepare,
    /// Becoming the user.
    User,
    /// Entering the working directory.
    Cwd,
    /// Running the program.
    Exec,
}

/// Why a program does not run. Nothing of it is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpawnError {
    /// See [`SpawnStep`].
    pub(crate) step: SpawnStep,
    /// The system's reason.
    pub(crate) errno: Errno,
}

/// Starts programs without copying the agent's page tables: the child borrows the agent's memory until it
/// runs the new program, while the agent stands still (`CLONE_VM | CLONE_VFORK`).
pub(crate) struct Spawner {
    /// Descriptors that a program may have, as it was before the agent took more for itself.
    files: libc::rlimit,
    /// The child's stack until then. 64 KiB, of which it touches the topmost page or two.
    stack: Vec<u128>,
}

/// What the child reads. Raw pointers, since it must not allocate, lock or unwind.
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
    /// `files`: soft and hard limit of descriptors of what is started.
    pub(crate) fn new(files: (u64, u64)) -> Self {
        Self {
            files: libc::rlimit {
                rlim_cur: files.0,
                rlim_max: files.1,
            },
            stack: vec![0; STACK_WORDS],
        }
    }

    /// Starts a program as leader of its own session; its process id.
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
        // SAFETY: `clone` needs the top of a stack that nobody else uses, 16-byte aligned, and a task
        // that outlives the child's use of it. The stack is this spawner's alone (`&mut self`) and made
        // of 16-byte words. With CLONE_VFORK this thread stands still until the child has exec'ed or
        // exited, so `task`, the pointer arrays and what they point at, all alive to the end of this
        // function, outlive that. `child` only makes system calls and writes to `task`.
        let pid = unsafe { libc::clone(child, top, flags, (&raw mut task).cast::<c_void>()) };
        if pid < 0 {
            let step = SpawnStep::Clone;
            return Err(SpawnError {
                step,
                errno: Errno::last(),
            });
        }
        // SAFETY: a volatile read needs a valid, initialised place. `task` is a live local; the child
        // that may have written to it is past its exec or exit. Volatile, since the compiler does not
        // know of that write. For this statement only.
        let (step, errno) = unsafe {
            (
                ptr::read_volatile(&raw const task.failed),
                ptr::read_volatile(&raw const task.errno),
            )
        };
        match errno {
            0 => Ok(pid),
            errno => {
                // It has exited already; this only takes it out of the process table.
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

/// The child between `clone` and `execve`. Only comes back to report a failure.
extern "C" fn child(task: *mut c_void) -> c_int {
    let task = task.cast::<ChildTask>();
    // SAFETY: needs a valid task to which nobody else refers meanwhile. `spawn` passes its local and
    // stands still until this process has left its memory. Until then.
    let task = unsafe { &mut *task };
    // SAFETY: `become_program` needs the pointers of a task made by `spawn`; this is one. Until exec.
    let (failed, errno) = unsafe { become_program(task) };
    // SAFETY: a volatile write needs a valid place; see above. Volatile, since the reader is another
    // process as far as the compiler can tell.
    unsafe {
        ptr::write_volatile(&raw mut task.failed, failed);
        ptr::write_volatile(&raw mut task.errno, errno);
    }
    127
}

/// The last error of the system, never zero.
fn last_errno() -> c_int {
    Errno::last_raw().max(1)
}

/// Does what the task says.
///
/// # Safety
/// Must run in a child made by [`Spawner::spawn`] with that call's task.
unsafe fn become_program(task: &ChildTask) -> (SpawnStep, c_int) {
    // SAFETY: these calls need valid pointers and descriptors, and that what they change belongs to this
    // process. The task's pointers are to null-terminated arrays and strings alive in `spawn`; `mask`
    // and `default` are locals. Signal dispositions and mask, descriptors, their limit, session and working directory
    // are the child's own, since `clone` was called without the flags that share them. User and groups
    // are set by bare system calls: the C library's wrappers would signal the threads of the parent.
    // Until exec.
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
        // A program that cannot have its usual limit runs with the agent's.
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
                // As a shell does: a later match that can be run wins, else this is the reason.
                libc::EACCES => worst = libc::EACCES,
                errno => return (SpawnStep::Exec, errno),
            }
            program = program.add(1);
        }
        (SpawnStep::Exec, worst)
    }
}

/// Most random bytes that are taken at once.
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
/// `FIFREEZE`, `_IOWR('X', 119, int)` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xc004_5877;

/// Mixes random bytes into the kernel's pool, credits all of them, and makes the generator draw a new key
/// from the pool at once (random(4)). `pool` is /dev/urandom. At most [`MAX_ENTROPY`] bytes.
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
    // SAFETY: the request reads a `rand_pool_info` whose `size` bytes are there. `info` has C's layout and
    // `size` was bounded by its array above. For the call only.
    Errno::result(unsafe { libc::ioctl(pool.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    // SAFETY: the request takes no argument. Nothing to outlive.
    Errno::result(unsafe { libc::ioctl(pool.as_raw_fd(), RNDRESEEDCRNG) })?;
    Ok(())
}

/// Writes a file system's journal out and stops changes to it, so that it is clean when the power goes.
pub(crate) fn freeze(dir: BorrowedFd<'_>) -> Result<(), Errno> {
    let unused: c_int = 0;
    // SAFETY: the request reads at most an int, which is there. For the call only.
    Errno::result(unsafe { libc::ioctl(dir.as_raw_fd(), FIFREEZE, &raw const unused) })?;
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
    // SAFETY: the request reads a `winsize`, which is a live local of C's layout. For the call only.
    Errno::result(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })?;
    Ok(())
}

/// Sets a network interface up (netdevice(7)). The kernel gives the loopback interface its addresses.
pub(crate) fn interface_up(socket: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    // SAFETY: `ifreq` is plain data for which zeros are valid. For ever.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return Err(Errno::ENAMETOOLONG);
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = c_char::from_ne_bytes([*byte]);
    }
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the request reads the name and writes the flags of an `ifreq`; both live in the local. For
    // the call only.
    Errno::result(unsafe { libc::ioctl(fd, libc::SIOCGIFFLAGS, &raw mut request) })?;
    // SAFETY: the kernel has just filled this member of the union. For the statement only.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let up = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
    request.ifr_ifru.ifru_flags = flags | up;
    // SAFETY: as above, and nothing is written.
    Errno::result(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS, &raw const request) })?;
    Ok(())
}

/// Makes orphaned grandchildren this process's children, as they are PID 1's.
pub(crate) fn adopt_orphans() -> Result<(), Errno> {
    // SAFETY: this option takes one number and touches no memory. Holds until the process ends.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })?;
    Ok(())
}

/// Takes a dead child out of the process table: its id and how it ended (waitpid(2)). `None` when none is
/// dead. Signals beyond the named ones are an end like any other, which is why this is no wrapper's type.
pub(crate) fn reap() -> Result<Option<(i32, c_int)>, Errno> {
    let mut status = 0;
    // SAFETY: the call writes one int to a place that has it. For the call only.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = Errno::result(pid)?;
    Ok((pid > 0).then_some((pid, status)))
}

/// Bytes of the kernel's generator.
pub(crate) fn random_bytes() -> Result<[u8; 16], Errno> {
    let mut bytes = [0_u8; 16];
    // SAFETY: the call writes at most the given length to a place that has it. For the call only.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast::<c_void>(), bytes.len(), 0) };
    match Errno::result(n)? {
        16 => Ok(bytes),
        _ => Err(Errno::EIO),
    }
}

/// Waits for one of a set of blocked signals; false when none came in time.
pub(crate) fn wait_for(signals: &nix::sys::signal::SigSet, within: std::time::Duration) -> bool {
    let time = nix::sys::time::TimeSpec::from_duration(within);
    // SAFETY: the call reads a signal set and a time and writes nothing, as the second pointer is null.
    // Both are live for the call. For the call only.
    let signal = unsafe { libc::sigtimedwait(signals.as_ref(), ptr::null_mut(), time.as_ref()) };
    signal > 0
}
