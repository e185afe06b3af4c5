//! Facts about the host and its processes, from /proc, clocks and the kernel's random generator. A value that cannot be
//! read is `None`, never zero.

use std::{
    fs, io,
    io::{Read, Seek},
    os::unix::fs::MetadataExt,
    path::Path,
};

use envd::guest_text;
pub(crate) use library::host::{disk_free, random};
use model::ProcessStat;
pub(crate) use model::clock::{boottime_ns, monotonic_ns, unix_ms, unix_ns};

/// Page size of x86-64, in bytes.
const PAGE: u64 = 4096;
/// Number of bytes at the end of a file that [`last_words`] reads.
const MAX_WORDS: u64 = 64 << 10;

/// CLOCK_BOOTTIME in milliseconds.
pub(crate) fn boottime_ms() -> u64 {
    boottime_ns() / 1_000_000
}

/// Identifies this boot of the host. Process ids are valid only within one boot.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// The value of a line of /proc/meminfo in bytes.
pub(crate) fn meminfo(name: &str) -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// Parses a line such as `Name:   123 kB` and returns its value in bytes.
fn kib_line(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| {
        let (found, rest) = line.split_once(':')?;
        (found == name).then_some(rest)
    })?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Share of the last 10 s in which a task waited for memory (PSI), in hundredths of a percent.
pub(crate) fn memory_stalls() -> Option<u32> {
    let text = fs::read_to_string("/proc/pressure/memory").ok()?;
    stalls(&text)
}

fn stalls(text: &str) -> Option<u32> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let (percent, hundredths) = some
        .strip_prefix("avg10=")?
        .split(' ')
        .next()?
        .split_once('.')?;
    Some(percent.parse::<u32>().ok()? * 100 + hundredths.parse::<u32>().ok()?)
}

/// Private memory of a process in bytes: pages that it has written, including pages of private file mappings. The file
/// `statm` costs the kernel a third of `status`, which has the same number.
pub(crate) fn private_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut pages = text.split(' ').skip(1).map(str::parse::<u64>);
    let (resident, shared) = (pages.next()?.ok()?, pages.next()?.ok()?);
    Some(resident.saturating_sub(shared) * PAGE)
}

/// Start time of a process in clock ticks since boot. Process id and start time together identify a process uniquely
/// within one boot. `None` if there is no such process or it is a zombie.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    stat(pid)
        .filter(ProcessStat::is_alive)
        .map(|stat| stat.start_ticks)
}

fn stat(pid: u32) -> Option<ProcessStat> {
    ProcessStat::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// CPU time of a process, including all its threads, in nanoseconds.
pub(crate) fn cpu_ns(pid: u32) -> Option<u64> {
    Some(stat(pid)?.cpu_ticks * 10_000_000)
}

/// Bytes on disk of the unlinked files that a process has open: the writable layer of a VM.
pub(crate) fn unlinked_bytes(pid: u32) -> Option<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten() {
        // Follows the magic link in /proc to the open file, which works even if the file has been unlinked.
        let Ok(meta) = fs::metadata(entry.path()) else {
            continue;
        };
        if meta.is_file() && meta.nlink() == 0 {
            sum += meta.blocks() * 512;
        }
    }
    Some(sum)
}

/// The last non-blank line of a file, escaped by [`guest_text`]. Only the end of the file is read.
pub(crate) fn last_words(path: &Path) -> Option<String> {
    let mut file = fs::File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(io::SeekFrom::Start(length.saturating_sub(MAX_WORDS)))
        .ok()?;
    let mut end = Vec::new();
    file.take(MAX_WORDS).read_to_end(&mut end).ok()?;
    let text = String::from_utf8_lossy(&end);
    let line = text.lines().rfind(|line| !line.trim().is_empty())?;
    Some(guest_text(line.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_are_read() {
        let text = "MemTotal:       24 kB\nMemAvailable:   1024 kB\nHugePages_Total:  3\n";
        assert_eq!(kib_line(text, "MemAvailable"), Some(1 << 20));
        assert_eq!(kib_line(text, "HugePages_Total"), None);
        assert_eq!(kib_line(text, "Mem"), None);
        let text =
            "some avg10=12.05 avg60=1.00 avg300=0.33 total=112964717\nfull avg10=0.00 total=1\n";
        assert_eq!(
            (stalls(text), stalls("full avg10=0.00")),
            (Some(1205), None)
        );
    }

    #[test]
    fn last_words_are_short_and_from_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stderr");
        assert_eq!(last_words(&path), None);
        fs::write(&path, "first\nlast\u{1b}[2J\n \n").unwrap();
        assert_eq!(last_words(&path).as_deref(), Some("last\\u{1b}[2J"));
        fs::write(&path, [b"x".repeat(1 << 20), b"\n".to_vec()].concat()).unwrap();
        let words = last_words(&path).unwrap();
        assert_eq!(words.chars().count(), envd::GUEST_TEXT_MAX);
    }

    #[test]
    fn this_process_is_found() {
        let me = std::process::id();
        assert!(start_ticks(me).is_some());
        assert!(private_bytes(me).unwrap() > 0);
        assert!(cpu_ns(me).is_some());
        assert_eq!(unlinked_bytes(me).map(|_| ()), Some(()));
        assert_eq!(start_ticks(u32::MAX), None);
    }
}
