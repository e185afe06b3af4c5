//! Makes system calls in another process through ptrace, simulating code that has taken over a VMM.
//!
//! ```text
//! seize, interrupt ─► set registers, write arguments to memory ─► run a `syscall` instruction of the VMM ─► read registers
//! ```
//! The process never resumes its own code. It is killed when the attempt is over. All requests must come from the
//! thread that seized the process (ptrace(2)).

mod tracee;

use std::{fs::File, ops::Range, os::unix::fs::FileExt, path::Path};

use nix::{
    errno::Errno,
    libc,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::process::{self, Mapping};
use tracee::{Halt, Tracee, broken};
pub(super) use tracee::{Relation, Stop, Try};

/// Bytes below the stack pointer that the System V ABI reserves for leaf functions.
const RED_ZONE: u64 = 128;
/// Bytes below the red zone that an attempt may use for paths, structures and results.
const SCRATCH: u64 = 32 << 10;
/// Bit of SIGSYS, the signal of the seccomp filter, in a signal set.
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const INT80: [u8; 2] = [0xcd, 0x80];

/// A traced process that makes the system calls of an attempt.
#[derive(Debug)]
pub(super) struct Intruder {
    tracee: Tracee,
    registers: libc::user_regs_struct,
    memory: File,
    /// Address of a `syscall` instruction.
    gate: u64,
    /// Free memory below the stack. Shrinks from its end as the attempt uses it.
    scratch: Range<u64>,
    /// Number of child processes that the process has created.
    pub(super) children: u32,
    /// Whether the process has executed another program.
    pub(super) replaced: bool,
}

impl Intruder {
    /// Seizes a process and stops it, whatever it is doing. Its text must have a `syscall` instruction, and its stack
    /// must have room for [`SCRATCH`] bytes.
    pub(super) fn enter(pid: u32, relation: Relation) -> Try<Self> {
        let raw = i32::try_from(pid).map_err(|e| broken("pid", e))?;
        let target = Pid::from_raw(raw);
        let tracee = Tracee::new(target, relation);
        let options = Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_EXITKILL
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEEXEC;
        ptrace::seize(target, options).map_err(|e| broken("cannot seize the VMM", e))?;
        ptrace::interrupt(target).map_err(|e| broken("cannot interrupt the VMM", e))?;
        tracee.next_halt("interrupt")?;
        let path = format!("/proc/{pid}/mem");
        let memory = File::options().read(true).write(true).open(path);
        let registers = ptrace::getregs(target);
        let mut intruder = Self {
            tracee,
            registers: registers.map_err(|e| broken("cannot read registers", e))?,
            memory: memory.map_err(|e| broken("cannot open the VMM's memory", e))?,
            gate: 0,
            scratch: 0..0,
            children: 0,
            replaced: false,
        };
        let gate = intruder.find(SYSCALL)?;
        intruder.gate = gate
            .ok_or_else(|| Stop::Broken("the VMM's text has no syscall instruction".to_owned()))?;
        intruder.scratch = intruder.below_the_stack()?;
        Ok(intruder)
    }

    pub(super) fn pid(&self) -> u32 {
        self.tracee.pid.as_raw().cast_unsigned()
    }

    pub(super) fn mappings(&self) -> Try<Vec<Mapping>> {
        process::mappings(self.pid()).map_err(|e| broken("cannot read the VMM's mappings", e))
    }

    /// Address of the first occurrence of these bytes in executable mappings of files.
    fn find(&self, bytes: [u8; 2]) -> Try<Option<u64>> {
        for mapping in self.mappings()?.iter().filter(|m| m.is_text()) {
            let text = self.read(mapping.range.start, mapping.len())?;
            let found = text.windows(2).position(|pair| pair == bytes);
            if let Some(offset) = found.and_then(|offset| u64::try_from(offset).ok()) {
                return Ok(Some(mapping.range.start + offset));
            }
        }
        Ok(None)
    }

    fn below_the_stack(&self) -> Try<Range<u64>> {
        let top = (self.registers.rsp - RED_ZONE) & !0xfff;
        let mapped = self.mappings()?;
        let holds =
            |m: &Mapping| m.range.contains(&(top - SCRATCH)) && m.range.contains(&(top - 1));
        if mapped.iter().any(holds) {
            Ok(top - SCRATCH..top)
        } else {
            Err(Stop::Broken(
                "the VMM's stack has no free memory".to_owned(),
            ))
        }
    }

    /// Makes a system call and returns its result. An error number becomes [`Stop::Refused`].
    pub(super) fn call(&mut self, name: &'static str, number: i64, arguments: &[i64]) -> Try<i64> {
        let word = |n: usize| arguments.get(n).copied().unwrap_or(0).cast_unsigned();
        let registers = libc::user_regs_struct {
            rip: self.gate,
            rax: number.cast_unsigned(),
            // Keeps the kernel from restarting a system call that the stop interrupted.
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

    /// Makes a system call whose success means that the attempt succeeded. Drops its result.
    pub(super) fn attempt(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: &[i64],
    ) -> Try<()> {
        self.call(name, number, arguments).map(drop)
    }

    /// Makes a system call as a 32-bit program does, with `int 0x80`.
    pub(super) fn call_32(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: &[i64],
    ) -> Try<i64> {
        let gate = self.find(INT80)?;
        // Code in a VMM would need an `int 0x80` in the VMM's text. If there is none, the tracer writes one over the
        // `syscall` instruction.
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
        ptrace::setregs(self.tracee.pid, registers)
            .map_err(|e| broken("cannot set registers", e))?;
        let mut entered = false;
        loop {
            ptrace::syscall(self.tracee.pid, None)
                .map_err(|e| broken("cannot resume the VMM", e))?;
            match self.tracee.next_halt(name)? {
                // The first stop may be the exit of the system call that the process was in when it was seized.
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
        self.check_filter_signal(name)?;
        let after =
            ptrace::getregs(self.tracee.pid).map_err(|e| broken("cannot read registers", e))?;
        let answer = after.rax.cast_signed();
        match i32::try_from(answer) {
            Ok(errno @ -4095..=-1) => Err(Stop::Refused(name, Errno::from_raw(-errno))),
            _ => Ok(answer),
        }
    }

    /// Whether the process is stopped at the entry of a system call, not at its exit.
    fn is_at_entry(&self) -> Try<bool> {
        let info = ptrace::syscall_info(self.tracee.pid);
        let info = info.map_err(|e| broken("cannot read the kind of a system call stop", e))?;
        Ok(info.op == libc::PTRACE_SYSCALL_INFO_ENTRY)
    }

    /// Delivers the SIGSYS of the seccomp filter, if it is pending.
    ///
    /// The kernel reports the exit of a filtered system call before it delivers the signal, with registers that look
    /// like a result, although the call was not made.
    fn check_filter_signal(&self, name: &'static str) -> Try<()> {
        let pending = process::status(self.pid(), "SigPnd").unwrap_or_default();
        let pending = u64::from_str_radix(&pending, 16).map_err(|e| broken("SigPnd", e))?;
        if pending & SIGSYS_BIT == 0 {
            return Ok(());
        }
        ptrace::cont(self.tracee.pid, None).map_err(|e| broken("cannot resume the VMM", e))?;
        match self.tracee.next_halt(name) {
            Err(stop) => Err(stop),
            Ok(_) => Err(Stop::Broken(format!("{name}: the process survived SIGSYS"))),
        }
    }

    /// Counts and kills a child that the process has created.
    fn end_child(&mut self) -> Try<()> {
        let child =
            ptrace::getevent(self.tracee.pid).map_err(|e| broken("cannot read an event", e))?;
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

    /// Reserves memory below the VMM's stack, and returns its address.
    pub(super) fn room(&mut self, bytes: usize) -> Try<i64> {
        let bytes = u64::try_from(bytes).map_err(|e| broken("size", e))?;
        let end = self.scratch.end - bytes;
        // The alignment that any C object may need.
        self.scratch.end = end & !0xf;
        if self.scratch.end > self.scratch.start {
            Ok(self.scratch.end.cast_signed())
        } else {
            Err(Stop::Broken("the attempt needs too much memory".to_owned()))
        }
    }

    /// Writes bytes to the process's memory, and returns their address.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Try<i64> {
        let at = self.room(bytes.len())?;
        self.write_at(at.cast_unsigned(), bytes)?;
        Ok(at)
    }

    /// Writes 64-bit words to the process's memory, and returns their address.
    pub(super) fn put_words(&mut self, words: &[i64]) -> Try<i64> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.put(&bytes)
    }

    /// Writes a path to the process's memory, and returns its address.
    pub(super) fn path(&mut self, path: &Path) -> Try<i64> {
        let mut bytes = path.as_os_str().as_encoded_bytes().to_vec();
        bytes.push(0);
        self.put(&bytes)
    }

    /// Reads the process's memory.
    pub(super) fn get(&self, at: i64, bytes: usize) -> Try<Vec<u8>> {
        self.read(at.cast_unsigned(), bytes)
    }

    fn read(&self, at: u64, bytes: usize) -> Try<Vec<u8>> {
        let mut read = vec![0; bytes];
        let done = self.memory.read_exact_at(&mut read, at);
        done.map_err(|e| broken("cannot read the VMM's memory", e))?;
        Ok(read)
    }

    /// Writes to the process's memory with the rights of a tracer, which may also write to read-only mappings.
    pub(super) fn write_at(&self, at: u64, bytes: &[u8]) -> Try<()> {
        let done = self.memory.write_all_at(bytes, at);
        done.map_err(|e| broken("cannot write the VMM's memory", e))
    }

    /// Finds a descriptor of the process by the target of its link in /proc/PID/fd. `what` names the descriptor in
    /// errors.
    pub(super) fn descriptor(&self, what: &str, is_it: impl Fn(&str) -> bool) -> Try<i64> {
        let all =
            process::descriptors(self.pid()).map_err(|e| broken("cannot list descriptors", e))?;
        let found = all.iter().find(|(_, link)| is_it(&link.to_string_lossy()));
        let found = found.map(|(number, _)| i64::from(*number));
        found.ok_or_else(|| Stop::Broken(format!("the VMM has no descriptor of {what}")))
    }
}

impl Drop for Intruder {
    /// Kills the process, which cannot resume its own code. Its parent is notified only after the tracer has waited for
    /// it.
    fn drop(&mut self) {
        if !self.tracee.ended.get() && kill(self.tracee.pid, Signal::SIGKILL).is_ok() {
            while self.tracee.next_halt("kill").is_ok() {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{process::Command, time::Instant};

    /// Needs no privileges, because a process may trace its child.
    #[test]
    fn system_calls_are_made_by_the_other_process() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        // `spawn` returns before the child's execve has ended.
        let deadline = Instant::now() + tracee::TIMEOUT;
        while !process::status(child.id(), "State").is_some_and(|state| state.starts_with('S')) {
            assert!(Instant::now() < deadline, "the child does not sleep");
            std::thread::yield_now();
        }
        let mut intruder = Intruder::enter(child.id(), Relation::Parent).unwrap();
        let pid = intruder.call("getpid", libc::SYS_getpid, &[]).unwrap();
        assert_eq!(pid, i64::from(child.id()));
        let refused = intruder.call("close", libc::SYS_close, &[4095]);
        assert_eq!(refused, Err(Stop::Refused("close", Errno::EBADF)));
        let end = intruder.call("kill", libc::SYS_kill, &[pid, libc::SIGKILL.into()]);
        assert_eq!(end, Err(Stop::Killed("kill", Signal::SIGKILL)));
        child.wait().unwrap();
    }
}
