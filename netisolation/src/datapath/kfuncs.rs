//! Relocates the programs' calls of kfuncs (kernel documentation, `bpf/kfuncs.rst`), which aya does not support.
//!
//! The programs call kfuncs by placeholder numbers. Before they are loaded, each placeholder is replaced with the
//! function's BTF id in the running kernel, and the instruction is marked as a kfunc call.

use aya_obj::btf::{Btf, BtfError, BtfKind};

/// Placeholders in `bpf/offload.h`, and the functions' names.
const FUNCTIONS: [(u32, &str); 2] = [
    (0x6375_6201, "bpf_cast_to_kern_ctx"),
    (0x6375_6202, "bpf_rdonly_cast"),
];
/// BPF_JMP | BPF_CALL without registers and offset.
const CALL: [u8; 4] = [0x85, 0, 0, 0];
/// [`CALL`] with BPF_PSEUDO_KFUNC_CALL in place of the source register.
const KFUNC_CALL: [u8; 4] = [0x85, 0x20, 0, 0];
/// Length of an instruction in bytes. Instructions in the object file are aligned to this length.
const INSTRUCTION: usize = 8;

#[derive(Debug, thiserror::Error)]
pub(crate) enum KfuncError {
    #[error("cannot read the kernel's type information (/sys/kernel/btf/vmlinux)")]
    Types(#[source] BtfError),
    #[error("the kernel does not offer the function {name} to eBPF programs")]
    Function {
        name: &'static str,
        #[source]
        source: BtfError,
    },
}

/// The object file with calls that the running kernel can resolve.
pub(crate) fn relocate(object: &[u8]) -> Result<Vec<u8>, KfuncError> {
    let kernel = Btf::from_sys_fs().map_err(KfuncError::Types)?;
    let mut relocated = object.to_vec();
    for (number, name) in FUNCTIONS {
        let id = kernel.id_by_type_name_kind(name, BtfKind::Func);
        let id = id.map_err(|source| KfuncError::Function { name, source })?;
        replace(&mut relocated, number, id);
    }
    Ok(relocated)
}

fn replace(object: &mut [u8], number: u32, id: u32) {
    let instruction = |start: [u8; 4], operand: u32| {
        let mut bytes = [0; INSTRUCTION];
        bytes[..4].copy_from_slice(&start);
        bytes[4..].copy_from_slice(&operand.to_le_bytes());
        bytes
    };
    let (from, to) = (instruction(CALL, number), instruction(KFUNC_CALL, id));
    let calls = object
        .chunks_exact_mut(INSTRUCTION)
        .filter(|bytes| **bytes == from);
    calls.for_each(|bytes| bytes.copy_from_slice(&to));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_placeholder_calls_are_replaced() {
        let [exit, call] = [
            [0x95, 0, 0, 0, 0, 0, 0, 0],
            [0x85, 0, 0, 0, 1, 0x62, 0x75, 0x63],
        ];
        let mut object = [exit, call, exit, call].concat();
        // The same bytes at an unaligned offset are not an instruction.
        object.extend([&[0; 4][..], &call, &[0; 4]].concat());
        replace(&mut object, FUNCTIONS[0].0, 0x0102_0304);
        let kfunc = [0x85, 0x20, 0, 0, 4, 3, 2, 1];
        assert_eq!(object[..32], [exit, kfunc, exit, kfunc].concat());
        assert_eq!(object[36..44], call);
    }
}
