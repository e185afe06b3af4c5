//! Determines the address of a page fault without a call of the gate, from the instruction and the guest's page tables.
//!
//! Only instructions with unambiguous operands are decoded, and an address counts only if the tables explain the
//! fault's error code there. For all others, the caller reads CR2.

use crate::{
    emulate,
    pagefault::{FETCH, PRESENT, USER, WRITE},
    pagetable,
    state::{Frame, peek},
};

/// The longest instruction, and the longest operand of a decoded one, in bytes.
const CODE: u64 = 16;
const OPERAND: u64 = 64;

/// The value of CR2. `None` if it must be read.
pub fn fault_address(frame: &Frame) -> Option<u64> {
    let error = frame.error;
    if error & !(PRESENT | WRITE | USER | FETCH) != 0 {
        return None;
    }
    if error & FETCH != 0 {
        return refused(frame.rip, CODE - 1, error);
    }
    // The page was executed a moment ago, but the monitor itself must never fault.
    let last = frame.rip.wrapping_add(CODE - 1);
    let crosses = last >> 12 != frame.rip >> 12;
    if !pagetable::is_mapped(frame.rip) || crosses && !pagetable::is_mapped(last) {
        return None;
    }
    let code = [peek::<u64>(frame.rip), peek::<u64>(frame.rip + 8)].map(u64::to_le_bytes);
    refused(
        operand(code.as_flattened(), frame, error & WRITE != 0)?,
        OPERAND,
        error,
    )
}

/// The first byte of an operand of at most `length` bytes at which the tables refuse the access.
fn refused(at: u64, length: u64, error: u64) -> Option<u64> {
    let next = at.wrapping_add(length - 1) & !0xfff;
    let mut starts = [at, next].into_iter().filter(|start| *start >= at);
    starts.find(|start| pagetable::refuses(*start, error))
}

/// Reads an instruction byte by byte.
struct Reader<'a> {
    code: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.code.get(self.at).copied()
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    /// A sign-extended displacement of one or four bytes.
    fn displacement(&mut self, bytes: usize) -> Option<u64> {
        let end = self.at + bytes;
        let value = match *self.code.get(self.at..end)? {
            [a] => i64::from(a as i8),
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            _ => return None,
        };
        self.at = end;
        Some(value as u64)
    }
}

/// The only address that an instruction reads or writes (Intel's manual, volume 2, chapter 2 and appendix A).
fn operand(code: &[u8], frame: &Frame, write: bool) -> Option<u64> {
    let mut reader = Reader { code, at: 0 };
    let (mut segment, mut short, mut rex) = (0, false, 0);
    let first = loop {
        match reader.byte()? {
            0x66 => short = true,
            0x64 => segment = emulate::read_fs_base(),
            0x65 => segment = emulate::read_gs_base(),
            0x26 | 0x2e | 0x36 | 0x3e | 0xf0 | 0xf2 | 0xf3 => {}
            prefix @ 0x40..=0x4f => {
                rex = prefix;
                break reader.byte()?;
            }
            other => break other,
        }
    };
    let (map, opcode) = match first {
        0xc5 => {
            reader.byte()?;
            (1, reader.byte()?)
        }
        0xc4 => {
            let byte = reader.byte()?;
            rex = !byte >> 5;
            reader.byte()?;
            (byte & 31, reader.byte()?)
        }
        0x0f => match reader.byte()? {
            0x38 => (2, reader.byte()?),
            0x3a => (3, reader.byte()?),
            opcode => (1, opcode),
        },
        opcode => (0, opcode),
    };
    let pushed = frame.rsp.wrapping_sub(8);
    match (map, opcode) {
        (0, 0x50..=0x57 | 0x68 | 0x6a | 0x9c | 0xe8) if !short => return Some(pushed),
        (0, 0x58..=0x5f | 0x9d | 0xc2 | 0xc3) if !short => return Some(frame.rsp),
        (0, 0xc9) => return Some(frame.rbp),
        (0, 0xaa | 0xab | 0xae | 0xaf) => return Some(frame.rdi),
        (0, 0xa4 | 0xa5) if write => return Some(frame.rdi),
        (0, 0xa4 | 0xa5 | 0xac | 0xad) => return Some(frame.rsi.wrapping_add(segment)),
        _ => {}
    }
    let modrm = reader.peek()?;
    let extension = modrm >> 3 & 7;
    let full = if short && rex & 8 == 0 { 2 } else { 4 };
    let immediate = match (map, opcode) {
        (0, 0x00..=0x3f) if opcode & 7 < 4 => 0,
        (0, 0x63 | 0x84..=0x8b | 0xd0..=0xd3 | 0xfe) => 0,
        (0, 0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6) => 1,
        (0, 0x69 | 0x81 | 0xc7) => full,
        (0, 0xf6) => u64::from(extension < 2),
        (0, 0xf7) => full * u64::from(extension < 2),
        // call and push: the write goes to the stack.
        (0, 0xff) if write && matches!(extension, 2 | 6) => return (!short).then_some(pushed),
        (0, 0xff) => 0,
        (1, 0x70 | 0xa4 | 0xac | 0xba | 0xc2 | 0xc4..=0xc6) => 1,
        (1, 0x10..=0x17 | 0x28..=0x2f | 0x40..=0x4f | 0x51..=0x76 | 0x7c..=0x7f) => 0,
        (1, 0x90..=0x9f | 0xa5 | 0xad | 0xaf..=0xb1 | 0xb6..=0xb8 | 0xbc..=0xc1 | 0xc3) => 0,
        (1, 0xc7) if extension == 1 => 0,
        // 0xf7 stores at rdi.
        (1, 0xd0..=0xf6 | 0xf8..=0xfe) => 0,
        // Gathers and masked accesses are left out.
        (2, 0x00..=0x2b | 0x30..=0x5a | 0x78 | 0x79 | 0x94..=0xbf | 0xdb..=0xdf | 0xf0..=0xf7) => 0,
        (3, _) => 1,
        _ => return None,
    };
    Some(memory(&mut reader, rex, immediate, frame)?.wrapping_add(segment))
}

/// The address of the operand that ModRM, SIB and displacement describe. `None` if it is a register.
fn memory(reader: &mut Reader, rex: u8, immediate: u64, frame: &Frame) -> Option<u64> {
    let modrm = reader.byte()?;
    let (mode, low) = (modrm >> 6, modrm & 7);
    let extended = (rex & 1) << 3;
    let (mut base, mut index) = (Some(low | extended), 0);
    if low == 4 {
        let sib = reader.byte()?;
        base = (sib & 7 != 5 || mode != 0).then_some(sib & 7 | extended);
        let number = sib >> 3 & 7 | (rex & 2) << 2;
        if number != 4 {
            index = register(frame, number) << (sib >> 6);
        }
    }
    let displacement = match (mode, base) {
        (0, None) => reader.displacement(4)?,
        (0, _) if low == 5 => {
            let displacement = reader.displacement(4)?;
            let next = frame.rip.wrapping_add(reader.at as u64 + immediate);
            return Some(next.wrapping_add(displacement));
        }
        (0, _) => 0,
        (1, _) => reader.displacement(1)?,
        (2, _) => reader.displacement(4)?,
        _ => return None,
    };
    let base = base.map_or(0, |number| register(frame, number));
    Some(base.wrapping_add(index).wrapping_add(displacement))
}

/// A general register by its number in instructions.
fn register(frame: &Frame, number: u8) -> u64 {
    match number {
        0 => frame.rax,
        1 => frame.rcx,
        2 => frame.rdx,
        3 => frame.rbx,
        4 => frame.rsp,
        5 => frame.rbp,
        6 => frame.rsi,
        7 => frame.rdi,
        8 => frame.r8,
        9 => frame.r9,
        10 => frame.r10,
        11 => frame.r11,
        12 => frame.r12,
        13 => frame.r13,
        14 => frame.r14,
        _ => frame.r15,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAX: u64 = 0x1000;
    const R9: u64 = 0x9000;
    const RSP: u64 = 0x7000;
    const RIP: u64 = 0x40_0000;

    fn decode(code: &[u8], write: bool) -> Option<u64> {
        let mut bytes = [0; CODE as usize];
        bytes[..code.len()].copy_from_slice(code);
        // SAFETY: all fields are integers.
        let mut frame: Frame = unsafe { core::mem::zeroed() };
        (frame.rax, frame.rcx, frame.rsp, frame.rip) = (RAX, 3, RSP, RIP);
        (frame.rsi, frame.rdi, frame.r9, frame.r12, frame.r13) =
            (0x5000, 0x6000, R9, 0xc000, 0xd000);
        operand(&bytes, &frame, write)
    }

    #[test]
    fn operands_are_found() {
        for (code, write, address) in [
            // mov rax, [rax]; mov [rax+8], rcx; mov [rax+rcx*8-0x10], r9
            (&[0x48, 0x8b, 0x00][..], false, RAX),
            (&[0x48, 0x89, 0x48, 0x08], true, RAX + 8),
            (&[0x4c, 0x89, 0x4c, 0xc8, 0xf0], true, RAX + 24 - 16),
            // mov rax, [r12]; mov rax, [r13+0]; mov rax, [r9+r12]
            (&[0x49, 0x8b, 0x04, 0x24], false, 0xc000),
            (&[0x49, 0x8b, 0x45, 0x00], false, 0xd000),
            (&[0x4b, 0x8b, 0x04, 0x21], false, R9 + 0xc000),
            // mov eax, ds:[0x1234]; mov rax, [rip+0x10]; mov dword [rip+0x10], 1; mov word [rip+0x10], 1
            (&[0x8b, 0x04, 0x25, 0x34, 0x12, 0, 0], false, 0x1234),
            (&[0x48, 0x8b, 0x05, 0x10, 0, 0, 0], false, RIP + 7 + 16),
            (
                &[0xc7, 0x05, 0x10, 0, 0, 0, 1, 0, 0, 0],
                true,
                RIP + 10 + 16,
            ),
            (&[0x66, 0xc7, 0x05, 0x10, 0, 0, 0, 1, 0], true, RIP + 9 + 16),
            // cmp byte [rip+0x10], 1; test dword [rip+0x10], 1; not dword [rip+0x10]
            (&[0x80, 0x3d, 0x10, 0, 0, 0, 1], false, RIP + 7 + 16),
            (
                &[0xf7, 0x05, 0x10, 0, 0, 0, 1, 0, 0, 0],
                false,
                RIP + 10 + 16,
            ),
            (&[0xf7, 0x15, 0x10, 0, 0, 0], true, RIP + 6 + 16),
            // push rax; pop rax; call rel; push [rax], twice; ret; leave
            (&[0x50], true, RSP - 8),
            (&[0x58], false, RSP),
            (&[0xe8, 1, 0, 0, 0], true, RSP - 8),
            (&[0xff, 0x30], false, RAX),
            (&[0xff, 0x30], true, RSP - 8),
            (&[0xc3], false, RSP),
            (&[0xc9], false, 0),
            // rep movsb, both sides; rep stosq; lodsb
            (&[0xf3, 0xa4], false, 0x5000),
            (&[0xf3, 0xa4], true, 0x6000),
            (&[0xf3, 0x48, 0xab], true, 0x6000),
            (&[0xac], false, 0x5000),
            // movzx, lock cmpxchg, movups, movdqu, pshufb, palignr, lock cmpxchg16b, bt [rip+0x10], 3
            (&[0x0f, 0xb6, 0x00], false, RAX),
            (&[0xf0, 0x48, 0x0f, 0xb1, 0x08], true, RAX),
            (&[0x0f, 0x11, 0x40, 0x10], true, RAX + 16),
            (&[0xf3, 0x0f, 0x6f, 0x00], false, RAX),
            (&[0x66, 0x0f, 0x38, 0x00, 0x00], false, RAX),
            (
                &[0x66, 0x0f, 0x3a, 0x0f, 0x05, 0x10, 0, 0, 0, 4],
                false,
                RIP + 10 + 16,
            ),
            (&[0xf0, 0x48, 0x0f, 0xc7, 0x08], true, RAX),
            (&[0x0f, 0xba, 0x25, 0x10, 0, 0, 0, 3], false, RIP + 8 + 16),
            // vmovdqu ymm0, [rax+0x20]; vmovdqu ymm0, [r9]; vpcmpeqb ymm1, ymm0, [rax+rcx]
            (&[0xc5, 0xfe, 0x6f, 0x40, 0x20], false, RAX + 32),
            (&[0xc4, 0xc1, 0x7e, 0x6f, 0x01], false, R9),
            (&[0xc5, 0xfd, 0x74, 0x0c, 0x08], false, RAX + 3),
        ] {
            assert_eq!(decode(code, write), Some(address), "{code:x?}");
        }
    }

    #[test]
    fn other_instructions_are_left_to_cr2() {
        for code in [
            // lea, mov with registers, a 32-bit address, bts [rax], rcx, cmpsb, xsave, a gather, EVEX, push with 16 bits
            &[0x48, 0x8d, 0x00][..],
            &[0x48, 0x8b, 0xc0],
            &[0x67, 0x8b, 0x00],
            &[0x48, 0x0f, 0xab, 0x08],
            &[0xa6],
            &[0x0f, 0xae, 0x20],
            &[0xc4, 0xe2, 0x7d, 0x90, 0x04, 0x08],
            &[0x62, 0xf1, 0x7f, 0x48, 0x6f, 0x00],
            &[0x66, 0x50],
            &[0x66; 16],
        ] {
            assert_eq!(decode(code, false), None, "{code:x?}");
        }
    }
}
