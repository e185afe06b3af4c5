//! The state file: CPU, platform and device state behind a checksummed header.

use std::path::Path;

use model::{Platform, TEMPLATE_FORMAT};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{SnapshotError, damaged};
use crate::{devices::BusState, platform::PlatformState};

const MAGIC: [u8; 8] = *b"CUBESNAP";
const HEADER: usize = 56;

/// The state of a VM without its memory and disk.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    pub platform: PlatformState,
    pub bus: BusState,
}

/// Encodes a state file.
///
/// # Errors
/// Returns [`SnapshotError::Encode`] if the codec fails.
pub fn encode(state: &MachineState, platform: Platform) -> Result<Vec<u8>, SnapshotError> {
    let body = postcard::to_allocvec(state).map_err(SnapshotError::Encode)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(TEMPLATE_FORMAT.to_le_bytes());
    bytes.extend(platform_code(platform).to_le_bytes());
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(&body));
    bytes.extend(body);
    Ok(bytes)
}

/// Decodes a state file of the platform `host`. Checks magic, format, platform, length and hash, in this order, before
/// it decodes the body. `path` is for messages.
///
/// # Errors
/// Returns [`SnapshotError::Magic`], [`SnapshotError::Format`], [`SnapshotError::Platform`] or
/// [`SnapshotError::Damaged`] for the first check that fails, and `Damaged` if the body cannot be decoded.
pub fn decode(path: &Path, bytes: &[u8], host: Platform) -> Result<MachineState, SnapshotError> {
    let word = |at: usize| {
        let b = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
        b.map(u32::from_le_bytes)
    };
    if !bytes.starts_with(&MAGIC) {
        return Err(SnapshotError::Magic(path.to_owned()));
    }
    let (Some(found), Some(platform), true) = (word(8), word(12), bytes.len() >= HEADER) else {
        return Err(damaged(path, "it is shorter than its header"));
    };
    if found != TEMPLATE_FORMAT {
        return Err(SnapshotError::Format { found });
    }
    let Some(found) = [Platform::Ring3, Platform::Hvm]
        .into_iter()
        .find(|known| platform_code(*known) == platform)
    else {
        return Err(damaged(
            path,
            format!("its platform has the unknown code {platform}"),
        ));
    };
    if found != host {
        return Err(SnapshotError::Platform { found, host });
    }
    let length = u64::from_le_bytes(bytes[16..24].try_into().unwrap_or_default());
    let body = &bytes[HEADER..];
    if length != body.len() as u64 {
        let what = format!(
            "its header states a body of {length} bytes, but the body has {}",
            body.len()
        );
        return Err(damaged(path, what));
    }
    if Sha256::digest(body)[..] != bytes[24..HEADER] {
        return Err(damaged(
            path,
            "its SHA-256 differs from the one in its header",
        ));
    }
    postcard::from_bytes(body)
        .map_err(|e| damaged(path, format!("its body cannot be decoded: {e}")))
}

fn platform_code(platform: Platform) -> u32 {
    match platform {
        Platform::Ring3 => 3,
        Platform::Hvm => 0,
    }
}
