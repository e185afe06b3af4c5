//! virtio-rng (virtio 1.2, 5.4): entropy from the host kernel. It is the smallest device, and the example for new ones.

use super::device::{Io, VirtioDevice};
use super::queue::Chain;
use super::registers::{COMMON_FEATURES, Identity};
use super::sys;

const DEVICE_ID: u32 = 4;
/// Limit on bytes per request. The driver requests the rest separately.
const REQUEST_MAX: usize = 4096;

/// The entropy device. It has no state: clones of one snapshot request entropy from the host and get different bytes.
#[derive(Debug)]
pub(super) struct Rng;

impl Rng {
    pub(super) fn identity() -> Identity {
        Identity {
            device_id: DEVICE_ID,
            features: COMMON_FEATURES,
            queue_sizes: &[8],
            config: Vec::new(),
        }
    }
}

/// Fills a request with random bytes. Returns their number.
fn serve(chain: &Chain<'_>) -> u32 {
    let mut done = 0;
    for slice in chain.writable.slices() {
        let len = slice.len().min(REQUEST_MAX - done);
        let Ok(piece) = slice.subslice(0, len) else {
            break;
        };
        match sys::random(&piece) {
            Ok(got) => done += got,
            Err(_) => break,
        }
        if done == REQUEST_MAX {
            break;
        }
    }
    u32::try_from(done).unwrap_or(0)
}

impl VirtioDevice for Rng {
    fn notify(&mut self, _queue: usize, io: &mut Io<'_>) {
        let Some(queue) = io.queues.first_mut() else {
            return;
        };
        loop {
            while let Some(chain) = queue.pop(io.ram) {
                let len = serve(&chain);
                queue.complete(io.ram, chain.head, len);
            }
            if !queue.await_kick(io.ram) {
                return;
            }
        }
    }
}
