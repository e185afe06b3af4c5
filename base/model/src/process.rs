//! A line of /proc/PID/stat.

/// Fields of proc_pid_stat(5) that this project reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// `Z` and `X` are states of processes that have ended.
    pub state: char,
    /// Process id of the parent.
    pub parent: u32,
    pub minor_faults: u64,
    pub major_faults: u64,
    /// User and system time of all threads, in ticks of 10 ms: USER_HZ is 100 on x86-64.
    pub cpu_ticks: u64,
    /// Start time in ticks since boot. Together with the process id, it identifies a process within one boot.
    pub start_ticks: u64,
    /// Address of the environment. 0 if the reader may not trace the process.
    pub env_start: u64,
}

impl ProcessStat {
    /// Parses the contents of the file. `None` if a field is missing, because the process ended while the file was
    /// read.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        // The name in field 2 can contain spaces and parentheses, so fields are counted after the last parenthesis.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // `fields` begins with field 3.
        let field = |number: usize| -> Option<u64> { fields.get(number - 3)?.parse().ok() };
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: u32::try_from(field(4)?).ok()?,
            minor_faults: field(10)?,
            major_faults: field(12)?,
            cpu_ticks: field(14)? + field(15)?,
            start_ticks: field(22)?,
            env_start: field(50)?,
        })
    }

    /// Whether the process has not ended. A zombie has ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_move_the_fields() {
        let numbers: Vec<String> = (4..=52).map(|field: u32| field.to_string()).collect();
        let line = format!("7 (a) Z 9 (b) S {}\n", numbers.join(" "));
        let stat = ProcessStat::parse(&line).unwrap();
        assert_eq!((stat.state, stat.parent), ('S', 4));
        assert_eq!((stat.minor_faults, stat.major_faults), (10, 12));
        assert_eq!((stat.cpu_ticks, stat.start_ticks), (29, 22));
        assert_eq!(stat.env_start, 50);
        assert!(stat.is_alive());
        let zombie = line.replace(") S ", ") Z ");
        assert!(!ProcessStat::parse(&zombie).unwrap().is_alive());
        for short in ["", "7 (a", "7 (a) S 1 2", "7 (a) S x"] {
            assert_eq!(ProcessStat::parse(short), None, "{short}");
        }
    }

    #[test]
    fn the_line_of_this_process_is_read() {
        let text = std::fs::read_to_string("/proc/self/stat").unwrap();
        let stat = ProcessStat::parse(&text).unwrap();
        assert!(stat.is_alive() && stat.start_ticks > 0 && stat.minor_faults > 0);
    }
}
