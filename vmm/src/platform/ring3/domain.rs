//! The Xen PV domain builder: the state in which a PV kernel starts (Xen public headers, `xen.h`, "start of day
//! structure passed to PVH/PV guests").
//!
//! From the kernel's virtual base on, everything is mapped contiguously: the kernel, the initrd, the p2m list,
//! start_info, the console ring, the page tables themselves and the boot stack; then at least 512 KiB of spare space,
//! up to a multiple of 4 MiB. Machine frames equal pseudo-physical frames, so the p2m list is the identity.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
};

use linux_loader::loader::{Elf, KernelLoader};
use model::HypercallPath;
use monitor::layout::{CONSOLE_PORT, L4_SLOT, offset};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::{
    boot_files::BootFiles,
    elf::{self, ElfError, XenNotes},
    image::{Entries, TABLE, identity_frames},
};
use crate::{devices::Ram, memory::PAGE};

/// `MAX_GUEST_CMDLINE` of Xen, terminating zero included.
const CMDLINE: usize = 1024;

/// Reasons why a domain could not be built.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    #[error(transparent)]
    Elf(#[from] ElfError),
    #[error("cannot load the kernel")]
    Load(#[source] linux_loader::loader::Error),
    #[error("cannot read the initramfs")]
    Initrd(#[source] std::io::Error),
    #[error("{what} does not fit into {ram} bytes of guest memory")]
    TooLarge {
        what: &'static str,
        /// Guest RAM in bytes.
        ram: u64,
    },
    #[error("the kernel command line has {len} bytes: the limit is {max}", max = CMDLINE - 1)]
    Cmdline { len: usize },
    /// The kernel does not contain exactly one match of each expected hypercall site.
    #[error(
        "cannot rewrite the kernel's hypercall sites: found {hypercall} of xen_hypercall_pv and {iret} of xen_iret, \
         expected 1 of each: use Debian's cloud kernel 6.1 or 6.12, or boot with hypercalls = \"trap\""
    )]
    HypercallSites {
        /// Number of matches for the hypercall site.
        hypercall: usize,
        /// Number of matches for the iret site.
        iret: usize,
    },
    #[error("cannot write to guest memory")]
    Memory(#[source] GuestMemoryError),
}

/// Registers and addresses for the kernel's start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    /// RIP.
    pub entry: u64,
    /// RSP.
    pub stack: u64,
    /// RSI: start_info.
    pub start_info: u64,
    /// CR3.
    pub cr3: u64,
    /// Guest-physical address of the console ring.
    pub console: u64,
}

/// Guest-physical addresses, each page-aligned.
struct Layout {
    initrd: u64,
    p2m: u64,
    start_info: u64,
    console: u64,
    tables: u64,
    table_count: u64,
    stack: u64,
    mapped: u64,
}

fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE) * PAGE
}

fn layout(kernel_end: u64, initrd_len: u64, ram: u64) -> Layout {
    let initrd = pages(kernel_end);
    let p2m = initrd + pages(initrd_len);
    let start_info = p2m + pages((ram >> 12) * 8);
    let console = start_info + PAGE;
    let tables = console + PAGE;
    // The tables map themselves, so their number is increased until it suffices for the resulting size.
    let mut table_count = 3;
    loop {
        let stack = tables + table_count * PAGE;
        let mapped = (stack + PAGE + (512 << 10)).div_ceil(4 << 20) * (4 << 20);
        let needed = 2 + mapped.div_ceil(1 << 30) + mapped.div_ceil(2 << 20);
        if needed <= table_count {
            return Layout {
                initrd,
                p2m,
                start_info,
                console,
                tables,
                table_count,
                stack,
                mapped,
            };
        }
        table_count = needed;
    }
}

/// Loads the kernel and the initramfs, and writes the p2m list, the page tables and start_info.
///
/// # Errors
/// Returns [`DomainError`] if a file is invalid or does not fit.
pub(crate) fn build(
    memory: &Ram,
    ram: u64,
    files: BootFiles<'_>,
    entries: &Entries,
) -> Result<Start, DomainError> {
    let notes = elf::xen_notes(files.kernel)?;
    let loaded = Elf::load(memory, None, files.kernel, None).map_err(DomainError::Load)?;
    let initrd_len = length(files.initrd).map_err(DomainError::Initrd)?;
    let at = layout(loaded.kernel_end, initrd_len, ram);
    if loaded.kernel_end > ram {
        return Err(DomainError::TooLarge {
            what: "the kernel",
            ram,
        });
    }
    if at.mapped > ram {
        return Err(DomainError::TooLarge {
            what: "the initramfs",
            ram,
        });
    }
    if files.hypercalls == HypercallPath::Call {
        rewrite_hypercalls(memory, loaded.kernel_end, entries)?;
    }
    let size = usize::try_from(initrd_len).unwrap_or(usize::MAX);
    memory
        .read_exact_volatile_from(GuestAddress(at.initrd), files.initrd, size)
        .map_err(DomainError::Memory)?;
    identity_frames(memory, at.p2m, ram).map_err(DomainError::Memory)?;
    page_tables(memory, &at, &notes, entries)?;
    start_info(memory, ram, &at, &notes, initrd_len, files.cmdline)?;
    Ok(Start {
        entry: notes.entry,
        stack: notes.virt_base + at.stack + PAGE,
        start_info: notes.virt_base + at.start_info,
        cr3: at.tables,
        console: at.console,
    })
}

fn length(file: &mut File) -> std::io::Result<u64> {
    let len = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    Ok(len)
}

fn put(memory: &Ram, at: u64, value: u64) -> Result<(), DomainError> {
    memory
        .write_obj(value, GuestAddress(at))
        .map_err(DomainError::Memory)
}

fn page_tables(
    memory: &Ram,
    at: &Layout,
    notes: &XenNotes,
    entries: &Entries,
) -> Result<(), DomainError> {
    let l4 = at.tables;
    let l3 = l4 + PAGE;
    let index = |level: u64| notes.virt_base >> level & 511;
    put(memory, l4 + index(39) * 8, l3 | TABLE)?;
    put(memory, l4 + L4_SLOT as u64 * 8, entries.l3 | TABLE)?;
    let gibs = at.mapped.div_ceil(1 << 30);
    for gib in 0..gibs {
        let l2 = l3 + PAGE + gib * PAGE;
        put(memory, l3 + (index(30) + gib) * 8, l2 | TABLE)?;
    }
    let first_l1 = l3 + PAGE + gibs * PAGE;
    for i in 0..at.mapped >> 21 {
        let l2 = l3 + PAGE + (i >> 9) * PAGE;
        put(memory, l2 + (i & 511) * 8, (first_l1 + i * PAGE) | TABLE)?;
    }
    for page in 0..at.mapped >> 12 {
        put(memory, first_l1 + page * 8, (page << 12) | TABLE)?;
    }
    Ok(())
}

/// Writes `struct start_info`.
fn start_info(
    memory: &Ram,
    ram: u64,
    at: &Layout,
    notes: &XenNotes,
    initrd_len: u64,
    cmdline: &str,
) -> Result<(), DomainError> {
    if cmdline.len() >= CMDLINE {
        return Err(DomainError::Cmdline { len: cmdline.len() });
    }
    let base = at.start_info;
    memory
        .write_slice(b"xen-3.0-x86_64", GuestAddress(base))
        .and_then(|()| memory.write_slice(cmdline.as_bytes(), GuestAddress(base + 128)))
        .map_err(DomainError::Memory)?;
    let fields = [
        (32, ram >> 12),                    // nr_pages
        (40, ram + offset::SHARED_INFO),    // shared_info, machine address
        (48, 0),                            // flags
        (56, 0),                            // store_mfn
        (64, 0),                            // store_evtchn
        (72, at.console >> 12),             // console.domU.mfn
        (80, u64::from(CONSOLE_PORT)),      // console.domU.evtchn
        (88, notes.virt_base + at.tables),  // pt_base
        (96, at.table_count),               // nr_pt_frames
        (104, notes.virt_base + at.p2m),    // mfn_list
        (112, notes.virt_base + at.initrd), // mod_start
        (120, initrd_len),                  // mod_len
    ];
    for (at, value) in fields {
        put(memory, base + at, value)?;
    }
    Ok(())
}

/// Linux's two hypercall sites. `xen_hypercall_pv`: push rcx, push r11, syscall, pop r11, pop rcx, jump to the return
/// thunk (or ret and padding), 16 bytes. `xen_iret`: push 0, push rcx, push r11, push rax, mov eax 23, syscall, 13
/// bytes and padding.
const CALL_SITE: &[u8] = b"\x51\x41\x53\x0f\x05\x41\x5b\x59";
const IRET_SITE: &[u8] = b"\x6a\x00\x51\x41\x53\x50\xb8\x17\x00\x00\x00\x0f\x05";

/// Rewrites the two sites in guest memory as jumps to the monitor, as Linux rewrites code with its alternatives. The
/// kernel file is not changed.
fn rewrite_hypercalls(memory: &Ram, end: u64, entries: &Entries) -> Result<(), DomainError> {
    let mut text = vec![0; usize::try_from(end).unwrap_or(0)];
    memory
        .read_slice(&mut text, GuestAddress(0))
        .map_err(DomainError::Memory)?;
    let (calls, irets) = (find(&text, CALL_SITE), find(&text, IRET_SITE));
    let ([call], [iret]) = (&calls[..], &irets[..]) else {
        return Err(DomainError::HypercallSites {
            hypercall: calls.len(),
            iret: irets.len(),
        });
    };
    // push rcx; push r11; movabs r11, target; jmp r11
    let mut jump = b"\x51\x41\x53\x49\xbb".to_vec();
    jump.extend(entries.hypercall.to_le_bytes());
    jump.extend(b"\x41\xff\xe3");
    // push rax; movabs rax, target; jmp rax
    let mut back = b"\x50\x48\xb8".to_vec();
    back.extend(entries.iret.to_le_bytes());
    back.extend(b"\xff\xe0");
    memory
        .write_slice(&jump, GuestAddress(*call as u64))
        .and_then(|()| memory.write_slice(&back, GuestAddress(*iret as u64)))
        .map_err(DomainError::Memory)
}

/// Offsets at which the pattern occurs. Only multiples of 16 are searched, because functions begin there; kernels with
/// indirect branch tracking, such as Debian's 6.12, begin `xen_hypercall_pv` with `endbr64`.
fn find(text: &[u8], pattern: &[u8]) -> Vec<usize> {
    const ENDBR64: &[u8] = b"\xf3\x0f\x1e\xfa";
    let body = |i: usize| i + ENDBR64.len() * usize::from(text[i..].starts_with(ENDBR64));
    (0..text.len())
        .step_by(16)
        .map(body)
        .filter(|i| text[*i..].starts_with(pattern))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hypercall_sites_are_rewritten_behind_endbr64_and_named_when_missing() {
        let memory = Ram::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let entries = Entries {
            syscall: 0,
            hypercall: 0x1111_2222_3333_4444,
            iret: 0x5555_6666_7777_8888,
            l3: 0,
        };
        let put = |at, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(at)).unwrap();
        put(0x1fb0, IRET_SITE);
        let why = rewrite_hypercalls(&memory, 1 << 20, &entries).unwrap_err();
        let named = "found 0 of xen_hypercall_pv and 1 of xen_iret, expected 1 of each";
        assert!(why.to_string().contains(named), "{why}");
        put(0x8630, b"\xf3\x0f\x1e\xfa");
        put(0x8634, CALL_SITE);
        rewrite_hypercalls(&memory, 1 << 20, &entries).unwrap();
        for (at, target) in [(0x8634 + 5, entries.hypercall), (0x1fb0 + 3, entries.iret)] {
            assert_eq!(memory.read_obj::<u64>(GuestAddress(at)).unwrap(), target);
        }
    }

    #[test]
    fn the_page_tables_map_themselves() {
        for ram in [128 << 20, 8 << 30_u64] {
            let at = layout(0x3e0_0000, 20 << 20, ram);
            assert!(at.stack + PAGE + (512 << 10) <= at.mapped);
            assert!(at.table_count >= 3 + (at.mapped >> 21));
            assert_eq!(at.mapped % (4 << 20), 0);
        }
    }
}
