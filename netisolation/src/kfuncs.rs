//! Calls of kernel functions that are no helpers (the kernel's `Documentation/bpf/kfuncs.rst`), which aya does not relocate.
//!
//! The programs call them by numbers of their own. Before they are loaded these become what the running kernel's type
//! information says, and the calls are marked as such.

use aya_obj::btf::{Btf, BtfError, BtfKind};

/// The numbers of `bpf/offload.h`.
const FUNCTIONS: [(u32, &str); 2] = [
    (0x6375_6201, "bpf_cast_to_kern_ctx"),
    (0x6375_6202, "bpf_rdonly_cast"),
];
/// BPF_JMP | BPF_CALL, no registers, no offset.
const CALL: [u8; 4] = [0x85, 0, 0, 0];
/// The same with BPF_PSEUDO_KFUNC_CALL as its source register.
const KFUNC_CALL: [u8; 4] = [0x85, 0x20, 0, 0];
/// Bytes of an instruction, at a multiple of which in the object each begins.
const INSTRUCTION: usize = 8;

/// Why the calls cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KfuncError {
    #[error("the kernel's type information (/sys/kernel/btf/vmlinux) cannot be read")]
    Types(#[source] BtfError),
    #[error("the kernel has no function {name}")]
    Function {
        name: &'static str,
        #[source]
        source: BtfError,
    },
}

/// The object with calls that the running kernel understands.
pub(crate) fn bind(object: &[u8]) -> Result<Vec<u8>, KfuncError> {
    let kernel = Btf::from_sys_fs().map_err(KfuncError::Types)?;
    let mut bound = object.to_vec();
    for (number, name) in FUNCTIONS {
        let id = kernel.id_by_type_name_kind(name, BtfKind::Func);
        let id = id.map_err(|source| KfuncError::Function { name, source })?;
        replace(&mut bound, number, id);
    }
    Ok(bound)
}

fn replace(object: &mut [u8], number: u32, id: u32) {
    let instruction = |start: [u8; 4], operand: u32| {
        let mut bytes = [0; INSTRUCTION];
        bytes[..4].copy_from_slice(&start);
        bytes[4..].copy_from_slice(&operand.to_le_bytes());
        bytes
    };
    let (ours, kernels) = (instruction(CALL, number), instruction(KFUNC_CALL, id));
    let calls = object
        .chunks_exact_mut(INSTRUCTION)
        .filter(|bytes| **bytes == ours);
    calls.for_each(|bytes| bytes.copy_from_slice(&kernels));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_become_those_of_the_kernel_and_nothing_else_changes() {
        let [exit, call] = [
            [0x95, 0, 0, 0, 0, 0, 0, 0],
            [0x85, 0, 0, 0, 1, 0x62, 0x75, 0x63],
        ];
        let mut object = [exit, call, exit, call].concat();
        // The same bytes in between are none.
        object.extend([&[0; 4][..], &call, &[0; 4]].concat());
        replace(&mut object, FUNCTIONS[0].0, 0x0102_0304);
        let kernels = [0x85, 0x20, 0, 0, 4, 3, 2, 1];
        assert_eq!(object[..32], [exit, kernels, exit, kernels].concat());
        assert_eq!(object[36..44], call);
    }
}
