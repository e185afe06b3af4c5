//! System calls made by another process, injected by ptrace: what the code of a taken-over VMM could do.
//!
//! ```text
//! seize, interrupt ─► registers and memory are the intruder's ─► `syscall` of its own text, one call after another
//! ```
//! The process never runs its own code again: it is killed when the attempt is over. The thread that enters it has to
//! make every call, as ptrace(2) wants it.

use std::{
    cell::Cell,
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid},
    },
    unistd::Pid,
};

use super::witness;

/// Below the stack pointer, which the System V ABI leaves to leaf functions.
const RED_ZONE: u64 = 128;
/// What an attempt's paths, structures and answers may take.
const SCRATCH: u64 = 32 << 10;
/// The bit of SIGSYS in a set of signals.
const FILTERS: u64 = 1 << (libc::SIGSYS - 1);
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const INT80: [u8; 2] = [0xcd, 0x80];
/// Any single call is answered by then, also on an emulated host.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why an attempt ended before it got what it wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The call was answered with an error.
    Refused(&'static str, Errno),
    /// The call was the last one.
    Killed(&'static str, Signal),
    /// All calls were answered, and nothing came of them.
    Futile(&'static str),
    /// It could not be tried, or the answer is not the one that was wanted.
    Broken(String),
}

impl Stop {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Refused(call, errno) => format!("{call}: {errno:?}"),
            Self::Killed(call, signal) => format!("{call}: killed by {signal}"),
            Self::Futile(what) => format!("no error, and {what}"),
            Self::Broken(what) => what.clone(),
        }
    }
}

pub(super) type Try<T> = Result<T, Stop>;

fn broken(what: &str, error: impl std::fmt::Display) -> Stop {
    Stop::Broken(format!("{what}: {error}"))
}

/// How a process ends for its tracer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kin {
    /// The prover is its parent as well, and reaps it elsewhere.
    Child,
    /// Its parent is another process, which is told of its end when the tracer has taken note.
    Stranger,
}

/// What a stopped process was stopped for.
enum Halt {
    /// At the entry of a system call, or at its exit.
    Call,
    /// One of the events that were asked for.
    Event(i32),
    /// A signal, which is not delivered.
    Signal,
}

/// A process that is traced from this thread.
#[derive(Debug)]
struct Leash {
    pid: Pid,
    kin: Kin,
    /// Its end was seen: the number may be another process's.
    ended: Cell<bool>,
}

impl Leash {
    /// Waits until the process stops or ends. Its end stays to be noted by whoever reaps it.
    fn next_halt(&self, call: &'static str) -> Try<Halt> {
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::__WALL;
        let look = look | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let deadline = Instant::now() + PATIENCE;
        let mut looks = 0_u32;
        loop {
            let status = waitid(Id::Pid(self.pid), look);
            match status.map_err(|e| broken("cannot wait for the VMM", e))? {
                WaitStatus::StillAlive if Instant::now() > deadline => {
                    return Err(Stop::Broken(format!("{call}: no answer in {PATIENCE:?}")));
                }
                WaitStatus::StillAlive => pause(&mut looks),
                WaitStatus::Signaled(_, signal, _) => {
                    self.note_end();
                    return Err(Stop::Killed(call, signal));
                }
                WaitStatus::Exited(_, status) => {
                    self.note_end();
                    return Err(Stop::Broken(format!("{call}: exited with {status}")));
                }
                stopped => {
                    self.take_note(WaitPidFlag::WSTOPPED);
                    return Ok(halt(stopped));
                }
            }
        }
    }

    fn note_end(&self) {
        self.ended.set(true);
        if self.kin == Kin::Stranger {
            self.take_note(WaitPidFlag::WEXITED);
        }
    }

    fn take_note(&self, of: WaitPidFlag) {
        // It is known to be there.
        let _ = waitid(
            Id::Pid(self.pid),
            of | WaitPidFlag::__WALL | WaitPidFlag::WNOHANG,
        );
    }
}

/// A process whose next calls are chosen here.
#[derive(Debug)]
pub(super) struct Intruder {
    leash: Leash,
    registers: libc::user_regs_struct,
    memory: File,
    /// Address of a `syscall` instruction.
    gate: u64,
    scratch: Range<u64>,
    /// Processes that it made.
    pub(super) children: u32,
    /// Whether it runs another program now.
    pub(super) replaced: bool,
}

impl Intruder {
    /// Stops the process, wherever it is.
    pub(super) fn enter(pid: u32, kin: Kin) -> Try<Self> {
        let raw = i32::try_from(pid).map_err(|e| broken("pid", e))?;
        let target = Pid::from_raw(raw);
        let leash = Leash {
            pid: target,
            kin,
            ended: Cell::new(false),
        };
        let options = Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_EXITKILL
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEEXEC;
        ptrace::seize(target, options).map_err(|e| broken("cannot seize the VMM", e))?;
        ptrace::interrupt(target).map_err(|e| broken("cannot interrupt the VMM", e))?;
        leash.next_halt("interrupt")?;
        let memory = format!("/proc/{pid}/mem");
        let memory = File::options().read(true).write(true).open(memory);
        let registers = ptrace::getregs(target);
        let mut intruder = Self {
            leash,
            registers: registers.map_err(|e| broken("cannot read registers", e))?,
            memory: memory.map_err(|e| broken("cannot open the VMM's memory", e))?,
            gate: 0,
            scratch: 0..0,
            children: 0,
            replaced: false,
        };
        let gate = intruder.find(SYSCALL)?;
        intruder.gate =
            gate.ok_or_else(|| Stop::Broken("the VMM's text has no syscall".to_owned()))?;
        intruder.scratch = intruder.below_the_stack()?;
        Ok(intruder)
    }

    pub(super) fn pid(&self) -> u32 {
        self.leash.pid.as_raw().cast_unsigned()
    }

    /// Mappings of the process, as /proc has them.
    pub(super) fn mappings(&self) -> Try<Vec<Mapping>> {
        mappings(self.pid()).map_err(|e| broken("cannot read the VMM's mappings", e))
    }

    /// The first place of these two bytes in executable memory of its program.
    fn find(&self, bytes: [u8; 2]) -> Try<Option<u64>> {
        for mapping in self.mappings()?.iter().filter(|m| m.is_text()) {
            let text = self.read(mapping.at.start, mapping.len())?;
            let found = text.windows(2).position(|pair| pair == bytes);
            if let Some(offset) = found.and_then(|offset| u64::try_from(offset).ok()) {
                return Ok(Some(mapping.at.start + offset));
            }
        }
        Ok(None)
    }

    fn below_the_stack(&self) -> Try<Range<u64>> {
        let top = (self.registers.rsp - RED_ZONE) & !0xfff;
        let mapped = self.mappings()?;
        let holds = |m: &Mapping| m.at.contains(&(top - SCRATCH)) && m.at.contains(&(top - 1));
        if mapped.iter().any(holds) {
            Ok(top - SCRATCH..top)
        } else {
            Err(Stop::Broken("the VMM's stack has no room".to_owned()))
        }
    }

    /// Makes one call. An error is [`Stop::Refused`].
    pub(super) fn call(&mut self, name: &'static str, number: i64, arguments: &[i64]) -> Try<i64> {
        let word = |n: usize| arguments.get(n).copied().unwrap_or(0).cast_unsigned();
        let registers = libc::user_regs_struct {
            rip: self.gate,
            rax: number.cast_unsigned(),
            // No call is interrupted that the kernel should start again.
            orig_rax: u64::MAX,
            rdi: word(0),
            rsi: word(1),
            rdx: word(2),
            r10: word(3),
            r8: word(4),
            r9: word(5),
            ..self.registers
        };
        self.run(name, registers)
    }

    /// Makes one call as a 32-bit program does.
    pub(super) fn call_32(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: &[i64],
    ) -> Try<i64> {
        let gate = self.find(INT80)?;
        // A taken-over VMM finds one in its own text; if this one has none, the tracer puts it there.
        let gate = match gate {
            Some(gate) => gate,
            None => self.write_at(self.gate, &INT80).map(|()| self.gate)?,
        };
        let word = |n: usize| arguments.get(n).copied().unwrap_or(0).cast_unsigned();
        let registers = libc::user_regs_struct {
            rip: gate,
            rax: number.cast_unsigned(),
            orig_rax: u64::MAX,
            rbx: word(0),
            rcx: word(1),
            rdx: word(2),
            ..self.registers
        };
        self.run(name, registers)
    }

    fn run(&mut self, name: &'static str, registers: libc::user_regs_struct) -> Try<i64> {
        ptrace::setregs(self.leash.pid, registers)
            .map_err(|e| broken("cannot set registers", e))?;
        let mut entered = false;
        loop {
            ptrace::syscall(self.leash.pid, None)
                .map_err(|e| broken("cannot resume the VMM", e))?;
            match self.leash.next_halt(name)? {
                // The exit of a call in which it was stopped, an execve for one, is not the exit of this one.
                Halt::Call if self.is_at_entry()? => entered = true,
                Halt::Call if entered => break,
                Halt::Call => {}
                Halt::Event(libc::PTRACE_EVENT_EXEC) => {
                    self.replaced = true;
                    return Ok(0);
                }
                Halt::Event(
                    libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE,
                ) => self.end_child()?,
                Halt::Event(_) | Halt::Signal => {}
            }
        }
        self.finish_off(name)?;
        let after =
            ptrace::getregs(self.leash.pid).map_err(|e| broken("cannot read registers", e))?;
        let answer = after.rax.cast_signed();
        match i32::try_from(answer) {
            Ok(errno @ -4095..=-1) => Err(Stop::Refused(name, Errno::from_raw(-errno))),
            _ => Ok(answer),
        }
    }

    /// Which end of a system call it is stopped at.
    fn is_at_entry(&self) -> Try<bool> {
        let info = ptrace::syscall_info(self.leash.pid);
        let info = info.map_err(|e| broken("cannot tell a call's entry from its exit", e))?;
        Ok(info.op == libc::PTRACE_SYSCALL_INFO_ENTRY)
    }

    /// The filter's signal is delivered after the call's exit has been reported, with registers that look like an
    /// answer: such a call has not been made.
    fn finish_off(&self, name: &'static str) -> Try<()> {
        let pending = witness::status(self.pid(), "SigPnd").unwrap_or_default();
        let pending = u64::from_str_radix(&pending, 16).map_err(|e| broken("SigPnd", e))?;
        if pending & FILTERS == 0 {
            return Ok(());
        }
        ptrace::cont(self.leash.pid, None).map_err(|e| broken("cannot resume the VMM", e))?;
        match self.leash.next_halt(name) {
            Err(stop) => Err(stop),
            Ok(_) => Err(Stop::Broken(format!("{name}: it lives after SIGSYS"))),
        }
    }

    /// A process that it made counts and ends.
    fn end_child(&mut self) -> Try<()> {
        let child =
            ptrace::getevent(self.leash.pid).map_err(|e| broken("cannot read an event", e))?;
        let child = Pid::from_raw(i32::try_from(child).map_err(|e| broken("pid", e))?);
        self.children += 1;
        kill(child, Signal::SIGKILL).map_err(|e| broken("cannot kill a child", e))?;
        loop {
            match waitpid(child, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Signaled(..) | WaitStatus::Exited(..)) => return Ok(()),
                Ok(_) => {}
                Err(e) => return Err(broken("cannot wait for a child", e)),
            }
        }
    }

    /// Room for that many bytes below the VMM's stack.
    pub(super) fn room(&mut self, bytes: usize) -> Try<i64> {
        let bytes = u64::try_from(bytes).map_err(|e| broken("room", e))?;
        let end = self.scratch.end - bytes;
        // As any object of C wants it.
        self.scratch.end = end & !0xf;
        if self.scratch.end > self.scratch.start {
            Ok(self.scratch.end.cast_signed())
        } else {
            Err(Stop::Broken("the attempt needs too much room".to_owned()))
        }
    }

    /// Puts bytes into its memory, and says where.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Try<i64> {
        let at = self.room(bytes.len())?;
        self.write_at(at.cast_unsigned(), bytes)?;
        Ok(at)
    }

    /// Puts 64-bit words into its memory, and says where.
    pub(super) fn put_words(&mut self, words: &[i64]) -> Try<i64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.put(&bytes)
    }

    /// Puts a path into its memory, and says where.
    pub(super) fn path(&mut self, path: &Path) -> Try<i64> {
        let mut bytes = path.as_os_str().as_encoded_bytes().to_vec();
        bytes.push(0);
        self.put(&bytes)
    }

    /// Bytes of its memory.
    pub(super) fn get(&self, at: i64, bytes: usize) -> Try<Vec<u8>> {
        self.read(at.cast_unsigned(), bytes)
    }

    fn read(&self, at: u64, bytes: usize) -> Try<Vec<u8>> {
        let mut read = vec![0; bytes];
        let done = self.memory.read_exact_at(&mut read, at);
        done.map_err(|e| broken("cannot read the VMM's memory", e))?;
        Ok(read)
    }

    /// Writes into its memory as the tracer that this is, whatever the mapping's rights.
    pub(super) fn write_at(&self, at: u64, bytes: &[u8]) -> Try<()> {
        let done = self.memory.write_all_at(bytes, at);
        done.map_err(|e| broken("cannot write the VMM's memory", e))
    }

    /// One of its descriptors, by what /proc says of it.
    pub(super) fn descriptor(&self, what: &str, is_it: impl Fn(&str) -> bool) -> Try<i64> {
        let all = descriptors(self.pid()).map_err(|e| broken("cannot list descriptors", e))?;
        let found = all.iter().find(|(_, link)| is_it(&link.to_string_lossy()));
        let found = found.map(|(number, _)| i64::from(*number));
        found.ok_or_else(|| Stop::Broken(format!("it has no descriptor of {what}")))
    }
}

impl Drop for Intruder {
    /// It cannot go on as itself. Whoever waits for it is told of its end only after its tracer.
    fn drop(&mut self) {
        if !self.leash.ended.get() && kill(self.leash.pid, Signal::SIGKILL).is_ok() {
            while self.leash.next_halt("kill").is_ok() {}
        }
    }
}

/// Mostly an answer is there at the next look.
fn pause(looks: &mut u32) {
    *looks += 1;
    match *looks {
        ..200 => thread::yield_now(),
        _ => thread::sleep(Duration::from_micros(200)),
    }
}

fn halt(status: WaitStatus) -> Halt {
    match status {
        WaitStatus::PtraceSyscall(_) => Halt::Call,
        WaitStatus::PtraceEvent(_, _, event) if event != 0 => Halt::Event(event),
        _ => Halt::Signal,
    }
}

/// One line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) at: Range<u64>,
    pub(super) rights: String,
    pub(super) name: String,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |hex: &str| u64::from_str_radix(hex, 16).ok();
        Some(Self {
            at: number(start)?..number(end)?,
            rights: words.next()?.to_owned(),
            name: words.nth(3).unwrap_or_default().to_owned(),
        })
    }

    pub(super) fn len(&self) -> usize {
        usize::try_from(self.at.end - self.at.start).unwrap_or(usize::MAX)
    }

    pub(super) fn is_executable(&self) -> bool {
        self.rights.contains('x')
    }

    /// Executable memory of the program's file.
    pub(super) fn is_text(&self) -> bool {
        self.is_executable() && self.name.starts_with('/')
    }
}

/// Mappings of a process.
pub(super) fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(text.lines().filter_map(Mapping::parse).collect())
}

/// Descriptors of a process, with what /proc says they are.
pub(super) fn descriptors(pid: u32) -> io::Result<Vec<(u32, PathBuf)>> {
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
    use std::process::Command;

    #[test]
    fn a_mapping_is_read() {
        let line = "00400000-005e1000 r-xp 00001000 fe:00 1234    /usr/bin/cube-vmm";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!(mapping.at, 0x40_0000..0x5e_1000);
        assert!(mapping.is_text());
        let heap = Mapping::parse("01000000-01021000 rw-p 00000000 00:00 0 [heap]").unwrap();
        assert!(!heap.is_text());
        assert_eq!(heap.len(), 0x21000);
    }

    /// Needs no right: a process may trace its child.
    #[test]
    fn a_call_is_made_by_the_other_process() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        // Its parent goes on before its execve has ended.
        let deadline = Instant::now() + PATIENCE;
        while !witness::status(child.id(), "State").is_some_and(|state| state.starts_with('S')) {
            assert!(Instant::now() < deadline, "it does not sleep");
            std::thread::yield_now();
        }
        let mut intruder = Intruder::enter(child.id(), Kin::Child).unwrap();
        let pid = intruder.call("getpid", libc::SYS_getpid, &[]).unwrap();
        assert_eq!(pid, i64::from(child.id()));
        let refused = intruder.call("close", libc::SYS_close, &[4095]);
        assert_eq!(refused, Err(Stop::Refused("close", Errno::EBADF)));
        let end = intruder.call("kill", libc::SYS_kill, &[pid, libc::SIGKILL.into()]);
        assert_eq!(end, Err(Stop::Killed("kill", Signal::SIGKILL)));
        child.wait().unwrap();
    }
}
