//! BPF_MAP_LOOKUP_ELEM and the batch commands of bpf(2) (`linux/bpf.h`) for the map of rules. aya does not offer the
//! batch commands.
#![expect(unsafe_code, reason = "these commands have no safe wrapper")]

use std::{
    io,
    mem::{MaybeUninit, size_of},
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

use aya::maps::lpm_trie::Key;
use nix::libc;

use crate::datapath::layout::{Rule, RuleKey};

/// A key as the kernel stores it.
pub(super) type RawKey = Key<RuleKey>;

/// Commands of bpf(2) (`linux/bpf.h`).
const LOOKUP_ELEM: libc::c_int = 1;
const LOOKUP_BATCH: libc::c_int = 24;
const UPDATE_BATCH: libc::c_int = 26;
const DELETE_BATCH: libc::c_int = 27;

/// The members of `union bpf_attr` for one element.
#[repr(C)]
struct Element {
    map: u32,
    zero: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `batch` of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    /// In: length of the arrays. Out: elements processed.
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// Writes each value under the key with the same index.
pub(super) fn update(map: BorrowedFd<'_>, keys: &[RawKey], values: &[Rule]) -> io::Result<()> {
    let mut batch = Batch {
        keys: address(keys.as_ptr()),
        values: address(values.as_ptr()),
        count: count(keys.len().min(values.len()))?,
        ..Batch::of(map)?
    };
    if batch.count == 0 {
        return Ok(());
    }
    // SAFETY: the kernel reads `count` keys and values of the sizes that the map was declared with, which are the sizes
    // of the types (a test compares `Rule` and `RuleKey` with the object file); both slices have at least `count`
    // elements and outlive the call.
    unsafe { call(UPDATE_BATCH, &raw mut batch) }
}

/// Removes keys in order, up to the first missing key or other error. Returns the number of keys removed.
pub(super) fn delete(map: BorrowedFd<'_>, keys: &[RawKey]) -> (usize, io::Result<()>) {
    let batch = Batch::of(map).and_then(|batch| {
        Ok(Batch {
            keys: address(keys.as_ptr()),
            count: count(keys.len())?,
            ..batch
        })
    });
    let mut batch = match batch {
        Ok(batch) => batch,
        Err(error) => return (0, Err(error)),
    };
    // SAFETY: the kernel reads `count` keys of the map's key size, which is the size of the type; the slice has `count`
    // elements and outlives the call.
    let outcome = unsafe { call(DELETE_BATCH, &raw mut batch) };
    (usize::try_from(batch.count).unwrap_or(0), outcome)
}

/// The value of the longest prefix that matches the key. `None` if no prefix matches.
pub(super) fn lookup(map: BorrowedFd<'_>, key: &RawKey) -> io::Result<Option<Rule>> {
    let mut value = MaybeUninit::<Rule>::zeroed();
    let mut element = Element {
        map: number(map)?,
        zero: 0,
        key: address(ptr::from_ref(key)),
        value: value.as_mut_ptr().expose_provenance() as u64,
        flags: 0,
    };
    // SAFETY: the kernel reads one key and writes one value of the sizes of the types; both outlive the call.
    match unsafe { call(LOOKUP_ELEM, &raw mut element) } {
        // SAFETY: `Rule` consists of integers, for which every value is valid, and all bytes are initialized: to zero
        // above and by the kernel; `value` is owned here.
        Ok(()) => Ok(Some(unsafe { value.assume_init() })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads up to `most` entries in the kernel's order: those after `from`, or the first ones if `from` is `None`.
pub(super) fn walk(
    map: BorrowedFd<'_>,
    from: Option<&RawKey>,
    most: usize,
) -> io::Result<Vec<(RawKey, Rule)>> {
    if most == 0 {
        return Ok(Vec::new());
    }
    let mut keys = vec![MaybeUninit::<RawKey>::zeroed(); most];
    let mut values = vec![MaybeUninit::<Rule>::zeroed(); most];
    let mut to = MaybeUninit::<RawKey>::zeroed();
    let mut batch = Batch {
        from: from.map_or(0, |key| address(ptr::from_ref(key))),
        to: to.as_mut_ptr().expose_provenance() as u64,
        keys: keys.as_mut_ptr().expose_provenance() as u64,
        values: values.as_mut_ptr().expose_provenance() as u64,
        count: count(most)?,
        ..Batch::of(map)?
    };
    // SAFETY: the kernel reads one key at `from` unless it is null, writes one key at `to` and at most `count` elements
    // at `keys` and `values`, all of the sizes of the types; each has room for them and outlives the call.
    match unsafe { call(LOOKUP_BATCH, &raw mut batch) } {
        // ENOENT: the walk reached the last entry.
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let read = usize::try_from(batch.count).map_err(io::Error::other)?;
    // SAFETY: keys and values consist of integers, for which every value is valid, and all bytes are initialized: to
    // zero above or by the kernel; the vectors own them.
    let entry = |(key, value): (&MaybeUninit<RawKey>, &MaybeUninit<Rule>)| unsafe {
        (key.assume_init(), value.assume_init())
    };
    Ok(keys.iter().zip(&values).take(read).map(entry).collect())
}

impl Batch {
    fn of(map: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            map: number(map)?,
            ..Self::default()
        })
    }
}

fn number(map: BorrowedFd<'_>) -> io::Result<u32> {
    u32::try_from(map.as_raw_fd()).map_err(io::Error::other)
}

fn count(length: usize) -> io::Result<u32> {
    u32::try_from(length).map_err(io::Error::other)
}

fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// # Safety
/// `attributes` must have the members of `union bpf_attr` that the command reads and writes, and every address in
/// `attributes` must be valid for the command's accesses.
unsafe fn call<T>(command: libc::c_int, attributes: *mut T) -> io::Result<()> {
    // SAFETY: the caller guarantees the contents of `attributes`; the kernel treats the members of `union bpf_attr`
    // beyond the passed size as zero.
    let outcome = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
