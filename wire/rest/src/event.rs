//! Sandbox lifecycle events, and webhooks that receive them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// An event, as listed and as delivered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleEvent {
    /// Always `v1`.
    pub version: String,
    pub id: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub event_data: EventData,
    pub sandbox_id: String,
    /// Changes with each resume.
    pub sandbox_execution_id: String,
    pub sandbox_template_id: String,
    pub sandbox_build_id: String,
    pub sandbox_team_id: String,
    pub timestamp: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventData {
    pub sandbox_metadata: BTreeMap<String, String>,
    /// The deadline after a create or an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set_timeout: Option<Timestamp>,
    /// The execution that ended with a pause or the end of the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    /// Extension to E2B's API: why a sandbox ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Extension to E2B's API: details of `sandbox.network.refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<RefusedTraffic>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    pub started_at: Timestamp,
    pub vcpu_count: u8,
    pub memory_mb: u64,
    /// In milliseconds.
    pub execution_time: u64,
}

/// Traffic refused since the sandbox's previous event of this type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedTraffic {
    /// Number of packets and requests.
    pub count: u64,
    /// Destination of the last one.
    pub destination: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub reason: String,
}

/// Body of `POST /events/webhooks`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewWebhook {
    pub name: String,
    pub url: String,
    /// Absent: enabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    pub events: Vec<String>,
    /// Never returned.
    pub signature_secret: String,
}

/// Body of `PATCH /events/webhooks/{id}`. Absent fields stay unchanged.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookUpdate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature_secret: Option<String>,
}

/// A webhook without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    pub id: String,
    pub team_id: String,
    pub name: String,
    pub url: String,
    pub enabled: bool,
    pub events: Vec<String>,
    pub created_at: Timestamp,
}

impl fmt::Debug for NewWebhook {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewWebhook")
            .field("name", &self.name)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for WebhookUpdate {
    /// Omits the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookUpdate")
            .field("name", &self.name)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// Whether the receiver has accepted a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryStatus {
    Success,
    Failed,
}

/// Why a delivery attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryError {
    /// The receiver responded with a status other than 2xx.
    HttpError,
    Timeout,
    /// The connection failed or broke.
    TransportError,
    /// Nothing was sent: the address is in a denied range.
    RequestError,
}

/// A delivery attempt to a webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDelivery {
    /// Id of the attempt.
    pub id: String,
    pub team_id: String,
    pub webhook_id: String,
    pub event_id: String,
    pub sandbox_id: String,
    pub event_type: String,
    pub status: DeliveryStatus,
    pub duration_ms: u64,
    /// The body that was sent, or its beginning.
    pub request_body: String,
    /// A JSON object, without the signatures.
    pub request_headers: String,
    pub request_url: String,
    /// Absent: no response arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_http_status_code: Option<u16>,
    /// Null: the attempt succeeded.
    pub error_class: Option<DeliveryError>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// Start of the attempt.
    pub timestamp: Timestamp,
}

/// The attempts to deliver an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDeliveryGroup {
    pub event_id: String,
    pub event_type: String,
    pub sandbox_id: String,
    pub attempts: Vec<WebhookDelivery>,
}

/// Response to `GET /events/webhooks/{id}/deliveries`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDeliveries {
    pub data: Vec<WebhookDeliveryGroup>,
    /// Null: this is the last page.
    pub next_cursor: Option<String>,
}

/// Durations in milliseconds; zero without attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeliveryDurations {
    pub minimum: f64,
    pub average: f64,
    pub maximum: f64,
}

/// The attempts in one hour.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryBucket {
    /// Beginning of the hour.
    pub timestamp: Timestamp,
    pub total: u64,
    pub failed: u64,
    pub duration_ms: DeliveryDurations,
}

/// Response to `GET /events/webhooks/{id}/stats`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryStats {
    /// Hours with attempts, oldest first.
    pub buckets: Vec<DeliveryBucket>,
    pub total: u64,
    pub failed: u64,
    pub duration_ms: DeliveryDurations,
}
