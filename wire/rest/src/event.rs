//! Events in the lives of sandboxes, and webhooks that get them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use envd::Timestamp;

/// An event, as listed and as delivered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleEvent {
    /// `v1`.
    pub version: String,
    pub id: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub event_data: EventData,
    pub sandbox_id: String,
    /// Another one after each resume.
    pub sandbox_execution_id: String,
    pub sandbox_template_id: String,
    pub sandbox_build_id: String,
    pub sandbox_team_id: String,
    pub timestamp: Timestamp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventData {
    pub sandbox_metadata: BTreeMap<String, String>,
    /// The end after a create or an update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set_timeout: Option<Timestamp>,
    /// The execution that a pause or the end has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    /// Not of E2B: why a sandbox ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Not of E2B: of `sandbox.network.refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<RefusedTraffic>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    pub started_at: Timestamp,
    pub vcpu_count: u8,
    pub memory_mb: u64,
    /// Milliseconds.
    pub execution_time: u64,
}

/// Traffic that was refused since the last such event of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedTraffic {
    /// Packets and requests.
    pub count: u64,
    /// Of the last one.
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

/// Body of `PATCH /events/webhooks/{id}`. What is absent stays.
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

/// Whether the receiver has taken a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryStatus {
    Success,
    Failed,
}

/// Why an attempt of a delivery failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryError {
    /// The receiver answered with another status than 2xx.
    HttpError,
    Timeout,
    /// No connection, or it broke.
    TransportError,
    /// Nothing was sent: the address is in a denied range.
    RequestError,
}

/// An attempt of a delivery to a webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDelivery {
    /// Of the attempt.
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
    /// Absent: no answer arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_http_status_code: Option<u16>,
    /// Null: the attempt succeeded.
    pub error_class: Option<DeliveryError>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// When the attempt began.
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

/// Answer of `GET /events/webhooks/{id}/deliveries`.
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

/// The attempts of an hour.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryBucket {
    /// Beginning of the hour.
    pub timestamp: Timestamp,
    pub total: u64,
    pub failed: u64,
    pub duration_ms: DeliveryDurations,
}

/// Answer of `GET /events/webhooks/{id}/stats`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryStats {
    /// Hours with attempts, oldest first.
    pub buckets: Vec<DeliveryBucket>,
    pub total: u64,
    pub failed: u64,
    pub duration_ms: DeliveryDurations,
}
