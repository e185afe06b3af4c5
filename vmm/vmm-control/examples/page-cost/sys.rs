//! Mappings that are accessed page by page, and userfaultfd.
#![expect(
    unsafe_code,
    reason = "measures the system calls themselves; std and nix have no safe wrappers"
)]

use std::{
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    ptr,
    sync::{
        Arc,
        atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        mman::{MmapAdvise, madvise},
        signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
    },
};

pub(crate) const PAGE: usize = 4096;

/// A mapping of this process, whole pages long. All methods panic if a page is not inside it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut libc::c_void,
    pages: usize,
}

impl Mapping {
    /// Maps `file` with `kind`, or anonymous memory. The file must have at least `pages` pages.
    pub(crate) fn new(file: Option<&File>, pages: usize, kind: i32) -> io::Result<Self> {
        let (fd, anonymous) = file.map_or((-1, libc::MAP_ANONYMOUS), |f| (f.as_raw_fd(), 0));
        let (rights, len) = (libc::PROT_READ | libc::PROT_WRITE, pages * PAGE);
        // SAFETY: the kernel chooses a range that nothing else in this process uses; `drop` removes it.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, rights, kind | anonymous, fd, 0) };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Self { base, pages }),
        }
    }

    /// First address of a page, of which `count` follow in the mapping.
    pub(crate) fn at(&self, page: usize, count: usize) -> *mut u8 {
        assert!(page + count <= self.pages);
        // SAFETY: needs an offset inside the mapping, which was compared with its length above.
        unsafe { self.base.cast::<u8>().add(page * PAGE) }
    }

    pub(crate) fn read(&self, page: usize) -> u8 {
        // SAFETY: the page is in a readable mapping that lives as long as `self`.
        unsafe { self.at(page, 1).read_volatile() }
    }

    /// Stores one byte, without a read before it.
    pub(crate) fn write(&self, page: usize) {
        // SAFETY: the page is in a writable mapping that lives as long as `self`; no reference to its bytes exists.
        unsafe { self.at(page, 1).write_volatile(1) }
    }

    pub(crate) fn copy(&self, page: usize, count: usize, from: &Self) {
        // SAFETY: both ranges are inside mappings that live during the call, and two mappings do not overlap.
        unsafe {
            ptr::copy_nonoverlapping(from.at(page, count), self.at(page, count), count * PAGE);
        }
    }

    pub(crate) fn populate_write(&self, page: usize, count: usize) {
        self.advise_pages(page, count, MmapAdvise::MADV_POPULATE_WRITE)
            .expect("MADV_POPULATE_WRITE");
    }

    /// Advises about the whole mapping.
    pub(crate) fn advise(&self, advice: MmapAdvise) -> nix::Result<()> {
        self.advise_pages(0, self.pages, advice)
    }

    fn advise_pages(&self, page: usize, count: usize, advice: MmapAdvise) -> nix::Result<()> {
        let at = ptr::NonNull::new(self.at(page, count).cast()).ok_or(Errno::EFAULT)?;
        // SAFETY: the pages are in this mapping, and the callers' advice changes no content.
        unsafe { madvise(at, count * PAGE, advice) }
    }

    /// Pages of the mapped file that are in its page cache (mincore).
    pub(crate) fn cached(&self) -> usize {
        let mut pages = vec![0_u8; self.pages];
        // SAFETY: mincore writes one byte for each page of the mapping, and the vector has as many.
        let outcome =
            unsafe { libc::mincore(self.base, self.pages * PAGE, pages.as_mut_ptr().cast()) };
        assert_eq!(outcome, 0, "mincore: {}", Errno::last());
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        let base = self.base.addr();
        base..base + self.pages * PAGE
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` made this mapping, and no reference into it exists.
        unsafe { libc::munmap(self.base, self.pages * PAGE) };
    }
}

// SAFETY: needs that threads can use a mapping together. Its methods are volatile accesses and system calls, and this
// program has no two threads that write the same page.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Shares the blocks of `from` with the empty file `to` (FICLONE).
pub(crate) fn reflink(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: FICLONE takes a descriptor number and no pointer; both files are open during the call.
    match unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ways to resolve a fault: `include/uapi/linux/userfaultfd.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// UFFDIO_COPY: a missing page gets a copy of the template's.
    Copy,
    /// UFFDIO_CONTINUE: the page of the file itself is mapped.
    Continue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handler {
    /// A thread reads the faults.
    Thread,
    /// The faulting thread gets SIGBUS (UFFD_FEATURE_SIGBUS) and resolves the fault in its handler.
    Signal,
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}
#[repr(C)]
struct Continue {
    start: u64,
    len: u64,
    mode: u64,
    mapped: i64,
}
nix::ioctl_readwrite!(uffdio_api, 0xAA, 0x3F, Api);
nix::ioctl_readwrite!(uffdio_register, 0xAA, 0x00, Register);
nix::ioctl_readwrite!(uffdio_copy, 0xAA, 0x03, Copy);
nix::ioctl_readwrite!(uffdio_continue, 0xAA, 0x07, Continue);

/// Size of `struct uffd_msg`, and offset of a fault's address in it.
const MESSAGE: usize = 32;
const ADDRESS: std::ops::Range<usize> = 16..24;

/// The one mapping that the SIGBUS handler serves.
static SERVED: (AtomicI32, AtomicUsize, AtomicUsize) =
    (AtomicI32::new(-1), AtomicUsize::new(0), AtomicUsize::new(0));

/// A mapping whose faults this process resolves.
#[derive(Debug)]
pub(crate) struct Faults {
    uffd: Arc<File>,
    /// Closing the stream ends the thread.
    thread: Option<(UnixStream, JoinHandle<()>)>,
}

impl Faults {
    pub(crate) fn new(
        mapping: &Mapping,
        template: &Arc<Mapping>,
        answer: Answer,
        handler: Handler,
    ) -> io::Result<Self> {
        const SIGBUS: u64 = 1 << 7;
        const MINOR_SHMEM: u64 = 1 << 10;
        const MISSING_MODE: u64 = 1;
        const MINOR_MODE: u64 = 4;
        // Without O_NONBLOCK, poll(2) returns an error for this descriptor.
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: userfaultfd takes flags only; the number that it returns has no other owner.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
        // SAFETY: as above.
        let uffd = Arc::new(File::from(unsafe { OwnedFd::from_raw_fd(fd) }));
        let range = mapping.range();
        let (mode, feature) = match answer {
            Answer::Copy => (MISSING_MODE, 0),
            Answer::Continue => (MINOR_MODE, MINOR_SHMEM),
        };
        let mut api = Api {
            api: 0xAA,
            features: feature
                | if handler == Handler::Signal {
                    SIGBUS
                } else {
                    0
                },
            ioctls: 0,
        };
        let mut register = Register {
            start: range.start as u64,
            len: range.len() as u64,
            mode,
            ioctls: 0,
        };
        // SAFETY: both structures are laid out as the kernel's and live during the calls.
        unsafe {
            uffdio_api(fd, &raw mut api)?;
            uffdio_register(fd, &raw mut register)?;
        }
        let thread = match handler {
            Handler::Signal => {
                let from = match answer {
                    Answer::Copy => template.range().start,
                    Answer::Continue => 0,
                };
                SERVED.0.store(fd, Relaxed);
                SERVED.1.store(range.start, Relaxed);
                SERVED.2.store(from, Relaxed);
                let action = SigHandler::SigAction(on_sigbus);
                let action = SigAction::new(action, SaFlags::SA_SIGINFO, SigSet::empty());
                // SAFETY: the handler only makes a system call, and reads atomic numbers.
                unsafe { sigaction(Signal::SIGBUS, &action) }?;
                None
            }
            Handler::Thread => {
                let (ours, theirs) = UnixStream::pair()?;
                let (uffd, template) = (Arc::clone(&uffd), Arc::clone(template));
                let serve = move || serve(&uffd, &theirs, range.start, &template, answer);
                Some((ours, thread::spawn(serve)))
            }
        };
        Ok(Self { uffd, thread })
    }

    /// Copies pages from the template before they are touched.
    pub(crate) fn copy(&self, mapping: &Mapping, page: usize, count: usize, from: &Mapping) {
        let (to, from) = (mapping.at(page, count).addr(), from.at(page, count).addr());
        copy_pages(self.uffd.as_raw_fd(), to, from, count * PAGE).expect("UFFDIO_COPY");
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        if let Some((stream, thread)) = self.thread.take() {
            drop(stream);
            thread.join().expect("the thread of a userfaultfd");
        }
    }
}

fn copy_pages(uffd: i32, to: usize, from: usize, len: usize) -> nix::Result<i32> {
    let mut copy = Copy {
        to: to as u64,
        from: from as u64,
        len: len as u64,
        mode: 0,
        copied: 0,
    };
    // SAFETY: the structure is laid out as the kernel's. The kernel checks both ranges.
    unsafe { uffdio_copy(uffd, &raw mut copy) }
}

fn map_page(uffd: i32, page: usize) -> nix::Result<i32> {
    let mut map = Continue {
        start: page as u64,
        len: PAGE as u64,
        mode: 0,
        mapped: 0,
    };
    // SAFETY: as in `copy_pages`.
    unsafe { uffdio_continue(uffd, &raw mut map) }
}

fn serve(uffd: &File, end: &UnixStream, base: usize, template: &Mapping, answer: Answer) {
    let mut message = [0; MESSAGE];
    loop {
        let wanted = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = [wanted(uffd.as_fd()), wanted(end.as_fd())];
        poll(&mut fds, PollTimeout::NONE).expect("poll");
        if fds[1].any() == Some(true) {
            return;
        }
        (&*uffd).read_exact(&mut message).expect("a fault");
        let address = message[ADDRESS].try_into().expect("eight bytes");
        let address = usize::try_from(u64::from_ne_bytes(address)).expect("an address");
        let page = address - address % PAGE;
        let fd = uffd.as_raw_fd();
        match answer {
            Answer::Copy => copy_pages(fd, page, template.range().start + page - base, PAGE),
            Answer::Continue => map_page(fd, page),
        }
        .expect("an answer to a fault");
    }
}

extern "C" fn on_sigbus(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t of a memory fault to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() }.addr();
    let page = address - address % PAGE;
    let (fd, base, from) = (&SERVED.0, &SERVED.1, &SERVED.2);
    let answered = match from.load(Relaxed) {
        0 => map_page(fd.load(Relaxed), page),
        from => copy_pages(
            fd.load(Relaxed),
            page,
            from + page - base.load(Relaxed),
            PAGE,
        ),
    };
    if answered.is_err() {
        // SAFETY: abort is safe to call in a signal handler.
        unsafe { libc::abort() };
    }
}
