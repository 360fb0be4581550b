{{- /* The container's environment. The first block is the chart's own; the schema keeps it out of the values. */ -}}
{{- define "router.env" -}}
- {name: MESSAGE_ROUTER_HOST, value: "0.0.0.0"}
- {name: MESSAGE_ROUTER_PORT, value: "8080"}
- {name: MESSAGE_ROUTER_STATE_DIR, value: /var/lib/message-router}
- {name: MESSAGE_ROUTER_SHUTDOWN_TIMEOUT, value: "{{ int .Values.shutdown.timeoutSeconds }}s"}
{{- with include "router.configUrl" . }}
- {name: MESSAGE_ROUTER_CONFIG_URL, value: {{ quote . }}}
{{- end }}
- {name: STANDBY_ENABLED, value: {{ has .Values.mode (list "standby" "leases") | quote }}}
{{- if eq .Values.mode "leases" }}
- {name: STANDBY_SCOPE, value: queue}
{{- end }}
{{- /* With KEDA nobody knows how many there will be: rates need a limits server. */ -}}
{{- if and (has .Values.mode (list "active-active" "leases")) (not .Values.keda.enabled) }}
{{- if not (hasKey .Values.settings "MESSAGE_ROUTER_REPLICAS") }}
- {name: MESSAGE_ROUTER_REPLICAS, value: {{ include "router.replicas" . | quote }}}
{{- end }}
{{- end }}
- name: STANDBY_INSTANCE_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: TMPDIR, value: /var/lib/message-router}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ kindIs "float64" $value | ternary (int64 $value) $value | toString | quote }}}
{{- end }}
{{- range $name, $_ := .Values.secrets.values }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ include "router.fullname" $ }}, key: {{ $name }}}}
{{- end }}
{{- range $name, $place := .Values.secrets.existing }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $place.name }}, key: {{ $place.key }}}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
