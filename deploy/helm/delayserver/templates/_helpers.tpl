{{- define "delayserver.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short enough for what is put behind it, in names of 63 characters. */}}
{{- define "delayserver.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "delayserver.name" . }}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- $whole | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "delayserver.selector" -}}
app.kubernetes.io/name: {{ include "delayserver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "delayserver.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "delayserver.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "delayserver.headless" -}}
{{ include "delayserver.fullname" . }}-nodes
{{- end }}

{{- define "delayserver.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "delayserver.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "delayserver.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "delayserver.secret" -}}
{{ .Values.existingSecret | default (include "delayserver.fullname" .) }}
{{- end }}

{{- define "delayserver.secretKey" -}}
{{ ternary .Values.existingSecretKey "token" (ne .Values.existingSecret "") }}
{{- end }}

{{- define "delayserver.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.existingSecret "") }}
{{- end }}

{{/* What the schema cannot say in a sentence. */}}
{{- define "delayserver.check" -}}
{{- if and (not .Values.token) (not .Values.existingSecret) }}
{{- fail "Others can reach the server, so it needs a token: set existingSecret, or token (openssl rand -hex 32)." }}
{{- end }}
{{- if and .Values.token .Values.existingSecret }}
{{- fail "token and existingSecret: give one of both." }}
{{- end }}
{{- if and (not .Values.cluster.url) (ne (int .Values.replicas) 1) }}
{{- fail "replicas is 1 without cluster.url: two servers cannot share their messages. For more cores set settings.shards, for more machines cluster.url." }}
{{- end }}
{{- if and .Values.cluster.url (hasKey .Values.settings "shards") }}
{{- fail "settings.shards is of a server alone: in a cluster it is cluster.shards." }}
{{- end }}
{{- if and .Values.cluster.url (not .Values.cluster.shards) }}
{{- fail "cluster.shards: say how many shards the cluster is made with, one or two for each core that its nodes will ever have together. It never changes." }}
{{- end }}
{{- if and .Values.tls.clientCa (not .Values.tls.existingSecret) }}
{{- fail "tls.clientCa needs tls.existingSecret." }}
{{- end }}
{{- end }}

{{/* Variables that commands for the brokers need, too. */}}
{{- define "delayserver.clusterEnv" -}}
- name: DELAYSERVER_CLUSTER
  value: {{ .Values.cluster.url | quote }}
{{- if .Values.cluster.kafkaConfig.existingSecret }}
- name: DELAYSERVER_KAFKA_CONFIG
  value: /etc/delayserver/kafka/{{ .Values.cluster.kafkaConfig.key }}
{{- end }}
{{- end }}

{{- define "delayserver.clusterMounts" -}}
{{- if .Values.cluster.kafkaConfig.existingSecret }}
- name: kafka
  mountPath: /etc/delayserver/kafka
  readOnly: true
{{- end }}
{{- end }}

{{- define "delayserver.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
