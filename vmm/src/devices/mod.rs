//! Virtio devices.
