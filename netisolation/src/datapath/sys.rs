//! BPF_PROG_QUERY (bpf(2)) for the tcx programs on a device. aya's query also opens the programs, which needs
//! more privileges.
#![expect(unsafe_code, reason = "this command has no safe wrapper")]

use std::{io, mem::size_of};

use nix::libc;

const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// Maximum number of programs on one device; if it has more, the query fails with ENOSPC.
const MAX_PROGRAMS: u32 = 64;

/// The member `query` of `union bpf_attr` (`linux/bpf.h`).
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

/// Ids of the tcx programs that run on frames from a device, in order.
pub(crate) fn programs_on(ifindex: u32) -> io::Result<Vec<u32>> {
    query(ifindex, BPF_TCX_INGRESS)
}

/// Ids of the tcx programs that run on frames to a device, in order.
pub(crate) fn programs_on_egress(ifindex: u32) -> io::Result<Vec<u32>> {
    query(ifindex, BPF_TCX_EGRESS)
}

fn query(ifindex: u32, attach_type: u32) -> io::Result<Vec<u32>> {
    let mut ids = [0_u32; MAX_PROGRAMS as usize];
    let mut query = Query {
        ifindex,
        attach_type,
        program_ids: (&raw mut ids).expose_provenance() as u64,
        count: MAX_PROGRAMS,
        ..Query::default()
    };
    let size = size_of::<Query>();
    // SAFETY: the kernel reads and writes `size` bytes of `query`, and writes at most `count` ids at `program_ids`,
    // which is `ids` with room for `count`; both outlive the call.
    let outcome = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size) };
    if outcome < 0 {
        return Err(io::Error::last_os_error());
    }
    let count = usize::try_from(query.count.min(MAX_PROGRAMS)).map_err(io::Error::other)?;
    Ok(ids.iter().take(count).copied().collect())
}
