//! Readiness of descriptors.
