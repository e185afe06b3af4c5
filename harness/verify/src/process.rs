//! Reads the state of a process from /proc.

use std::{
    fs, io,
    ops::Range,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use model::ProcessStat;

/// State of a process, a letter as in proc_pid_stat(5). `None` if there is no such process.
pub(crate) fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(ProcessStat::parse(&stat)?.state)
}

/// Whether a process exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Waits up to `timeout` for a process to end. Returns whether it has ended.
pub(crate) fn ends_within(pid: u32, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    while is_alive(pid) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    !is_alive(pid)
}

/// Value of a line of /proc/PID/status. `None` if there is no such line or process.
pub(crate) fn status(pid: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    line(&text, name)
}

/// Value of a line of a `status` file, with single blanks between its words.
pub(crate) fn line(text: &str, name: &str) -> Option<String> {
    let rest = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    rest.map(|value| value.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Target of a link in /proc/PID. `None` if it cannot be read.
pub(crate) fn link(pid: u32, name: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/{name}")).ok()
}

/// Whether a process is in a different namespace of this kind than the suite.
pub(crate) fn has_other_namespace(pid: u32, namespace: &str) -> bool {
    let of = |pid: u32| link(pid, &format!("ns/{namespace}"));
    of(pid).is_some_and(|theirs| of(std::process::id()) != Some(theirs))
}

/// Soft and hard limit of a process, as in /proc/PID/limits.
pub(crate) fn limit(pid: u32, name: &str) -> io::Result<[String; 2]> {
    let text = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name));
    let mut words = rest
        .unwrap_or_default()
        .split_whitespace()
        .map(str::to_owned);
    match (words.next(), words.next()) {
        (Some(soft), Some(hard)) => Ok([soft, hard]),
        _ => Err(io::Error::other(format!(
            "/proc/PID/limits has no line {name:?}"
        ))),
    }
}

/// One line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<u64>,
    pub(crate) rights: String,
    pub(crate) name: String,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |hex: &str| u64::from_str_radix(hex, 16).ok();
        Some(Self {
            range: number(start)?..number(end)?,
            rights: words.next()?.to_owned(),
            name: words.nth(3).unwrap_or_default().to_owned(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }

    pub(crate) fn is_executable(&self) -> bool {
        self.rights.contains('x')
    }

    /// Whether this is an executable mapping of a file.
    pub(crate) fn is_text(&self) -> bool {
        self.is_executable() && self.name.starts_with('/')
    }
}

pub(crate) fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(text.lines().filter_map(Mapping::parse).collect())
}

/// Descriptors of a process, each with the target of its link in /proc/PID/fd.
pub(crate) fn descriptors(pid: u32) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let number = entry.file_name().to_string_lossy().parse();
        found.push((
            number.map_err(io::Error::other)?,
            fs::read_link(entry.path())?,
        ));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_is_decoded() {
        let line = "00400000-005e1000 r-xp 00001000 fe:00 1234    /usr/bin/cube-vmm";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.range, 0x40_0000..0x5e_1000);
        assert!(mapping.is_text());
        let heap = Mapping::parse("01000000-01021000 rw-p 00000000 00:00 0 [heap]").unwrap();
        assert!(!heap.is_text());
        assert_eq!(heap.len(), 0x21000);
    }

    #[test]
    fn the_state_of_this_process_is_read() {
        let own = std::process::id();
        assert!(is_alive(own));
        assert!(!has_other_namespace(own, "user"));
        assert!(status(own, "Uid").unwrap().split(' ').count() == 4);
        assert_eq!(status(own, "NoSuchLine"), None);
        assert!(limit(own, "Max open files").is_ok());
        assert!(limit(own, "Max nothing").is_err());
    }
}
