//! BPF_PROG_QUERY (bpf(2)) of the programs at a device's entrance. aya's own asks for more privileges, because it opens
//! the programs as well.
#![expect(unsafe_code, reason = "there is no safe wrapper of this command")]

use std::{io, mem::size_of};

use nix::libc;

const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_TCX_INGRESS: u32 = 46;
/// Programs on one device that are looked at; more are an error (ENOSPC).
const MOST: u32 = 64;

/// `query` of `union bpf_attr` (`linux/bpf.h`).
#[repr(C)]
#[derive(Default)]
struct Query {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    zero: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Numbers of the tcx programs that a frame from a device meets, in order.
pub(crate) fn programs(ifindex: u32) -> io::Result<Vec<u32>> {
    let mut ids = [0_u32; MOST as usize];
    let mut query = Query {
        ifindex,
        attach_type: BPF_TCX_INGRESS,
        program_ids: (&raw mut ids).expose_provenance() as u64,
        count: MOST,
        ..Query::default()
    };
    let size = size_of::<Query>();
    // SAFETY: the kernel reads and writes `size` bytes of `query`, and at most `count` numbers at `program_ids`, which is
    // `ids` with room for as many; both outlive the call.
    let outcome = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size) };
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    let count = usize::try_from(query.count.min(MOST)).map_err(io::Error::other)?;
    Ok(ids.iter().take(count).copied().collect())
}
