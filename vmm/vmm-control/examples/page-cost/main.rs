//! Measures the cost of a clone's page on this host, for different ways to provide the template's memory. Decision 012
//! has a table of the results. Needs root, 2 GiB of memory and, for the rows with hugetlb, free pages of 2 MiB:
//!
//! ```text
//! sysctl vm.nr_hugepages=300
//! cargo run --release -p vmm-control --example page-cost -- DIR [REFLINK_DIR]
//! ```
//! `DIR` is on the disk file system to measure, `REFLINK_DIR` on one with FICLONE. The program runs on one CPU, the last
//! that it may use. All mechanisms are measured in turn, seven times. It prints CPU time of the process for each page
//! (handler thread included), best and median, and the best wall time.

mod report;
mod sys;
mod template;

use std::{
    error::Error,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use report::{anonymous, memory_info, page_tables};
use sys::{
    Answer::{Continue, Copy},
    Handler::{Signal, Thread},
};
use template::{Ahead, Backing, Disk, PAGES, Templates, read};

const TURNS: usize = 7;
/// Number of touched pages, as in a small working set, and the distance between scattered ones.
const TOUCHED: u32 = 1024;
const STRIDE: usize = 64;
/// [`PAGES`] as a divisor.
const ALL: u32 = 65_536;

/// Phases of a measurement, in the order of [`Turn::costs`]. Costs are per page unless the name says "whole".
const PHASES: [&str; 9] = [
    "open and map, whole",
    "read scattered",
    "read all",
    "write scattered",
    "write a row",
    "write after read",
    "read all after writes",
    "unmap, whole",
    "unmap after writes, whole",
];

/// A name, the source of a clone's memory, and the way in which pages are made private.
type Mechanism = (&'static str, Backing, Ahead);

const MECHANISMS: [Mechanism; 15] = [
    stored("tmpfs 2 MiB", Backing::Tmpfs),
    ("tmpfs 2 MiB, populate", Backing::Tmpfs, Ahead::Populate),
    stored("tmpfs 4 KiB", Backing::Memfd),
    stored("disk, as written", Backing::Disk(Disk::Written)),
    stored("disk, read back", Backing::Disk(Disk::ReadBack)),
    stored("disk, MADV_HUGEPAGE", Backing::Disk(Disk::HugePages)),
    stored("reflink", Backing::Reflink),
    stored("hugetlb", Backing::Hugetlb),
    ("anonymous, copied", Backing::Anonymous, Ahead::Copy),
    (
        "uffd copy ahead",
        Backing::Uffd(Copy, Signal),
        Ahead::UffdCopy,
    ),
    stored("uffd missing, SIGBUS", Backing::Uffd(Copy, Signal)),
    stored("uffd missing, thread", Backing::Uffd(Copy, Thread)),
    stored("uffd minor, SIGBUS", Backing::Uffd(Continue, Signal)),
    stored("uffd minor, thread", Backing::Uffd(Continue, Thread)),
    // The same as the first one. The difference between them is noise.
    stored("tmpfs 2 MiB, again", Backing::Tmpfs),
];

const fn stored(name: &'static str, backing: Backing) -> Mechanism {
    (name, backing, Ahead::Store)
}

#[derive(Debug, Clone, Copy)]
struct Cost {
    cpu: Duration,
    wall: Duration,
}

/// One measurement of one mechanism.
#[derive(Debug)]
struct Turn {
    costs: [Option<Cost>; PHASES.len()],
    /// KiB that are private to the clone after the scattered reads, and after the scattered writes.
    private: [u64; 2],
    /// KiB of page tables after all pages were read.
    tables: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let dir = arguments
        .next()
        .ok_or("usage: page-cost DIR [REFLINK_DIR]")?;
    let cpu = pin()?;
    let templates = Templates::new(dir, arguments.next())?;
    report::print_host(cpu)?;
    let mut turns: Vec<Vec<Turn>> = MECHANISMS.iter().map(|_| Vec::new()).collect();
    for turn in 0..TURNS {
        for (mechanism, turns) in MECHANISMS.iter().zip(&mut turns) {
            match measure(&templates, *mechanism) {
                Ok(turn) => turns.push(turn),
                Err(e) if turn == 0 => eprintln!("{}: {e}", mechanism.0),
                Err(_) if turns.is_empty() => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    report::print_table(&turns);
    report::print_host(cpu)?;
    templates.print_reflinks()?;
    Ok(())
}

/// Runs this process on the last CPU that it may use.
fn pin() -> nix::Result<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let last = (0..CpuSet::count())
        .rev()
        .find(|cpu| allowed.is_set(*cpu) == Ok(true));
    let mut one = CpuSet::new();
    let cpu = last.unwrap_or(0);
    one.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &one)?;
    Ok(cpu)
}

fn measure(templates: &Templates, (_, backing, ahead): Mechanism) -> io::Result<Turn> {
    let one = |page| (page, 1);
    let apart: Vec<(usize, usize)> = scattered().map(one).collect();
    // Without a template underneath, pages that were not copied are zero.
    let reads = ahead == Ahead::Store;
    let mut made = Err(io::Error::other("not started"));
    let map = timed(1, || made = templates.start(backing));

    let clone = made?;
    let read_some = reads.then(|| timed(TOUCHED, || read(&clone.mapping, scattered())));
    let private_read = anonymous(&clone.mapping.range())?;
    let again = reads.then(|| timed(TOUCHED, || clone.write(ahead, &apart, templates)));
    let rest = reads.then(|| timed(ALL, || read(&clone.mapping, 0..PAGES)));
    drop(clone);

    let clone = templates.start(backing)?;
    let before = page_tables()?;
    let all = reads.then(|| timed(ALL, || read(&clone.mapping, 0..PAGES)));
    let tables = page_tables()?.saturating_sub(before);
    let unmap = reads.then(|| timed(1, || drop(clone)));

    let clone = templates.start(backing)?;
    let free = memory_info("HugePages_Free:")?;
    let write = timed(TOUCHED, || clone.write(ahead, &apart, templates));
    let copied = free.saturating_sub(memory_info("HugePages_Free:")?) * 2048;
    let private = anonymous(&clone.mapping.range())? + copied;
    let unmap_written = timed(1, || drop(clone));

    let clone = templates.start(backing)?;
    let row = timed(TOUCHED, || {
        clone.write(ahead, &[(0, PAGES / STRIDE)], templates)
    });
    Ok(Turn {
        costs: [
            Some(map),
            read_some,
            all,
            Some(write),
            Some(row),
            again,
            rest,
            unmap,
            Some(unmap_written),
        ],
        private: [private_read, private],
        tables,
    })
}

fn scattered() -> impl Iterator<Item = usize> {
    (0..PAGES).step_by(STRIDE)
}

fn timed(count: u32, work: impl FnOnce()) -> Cost {
    let cpu = || clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from);
    let (wall, before) = (Instant::now(), cpu().expect("a clock of this process"));
    work();
    let after = cpu().expect("a clock of this process");
    Cost {
        cpu: (after - before) / count,
        wall: wall.elapsed() / count,
    }
}
