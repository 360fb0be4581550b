{{- define "router.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* The name is never another: it becomes the job of Prometheus, which the alerts ask for. */ -}}
{{- define "router.selectorLabels" -}}
app.kubernetes.io/name: message-router
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "router.labels" -}}
{{ include "router.selectorLabels" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "router.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "router.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "router.replicas" -}}
{{- if kindIs "invalid" .Values.replicas -}}
{{- ternary 1 2 (eq .Values.mode "single") -}}
{{- else -}}
{{- int .Values.replicas -}}
{{- end -}}
{{- end -}}

{{- /* Whether there may be more than one pod at a time: "true" or nothing. */ -}}
{{- define "router.isMany" -}}
{{- if or .Values.keda.enabled (gt (include "router.replicas" . | int) 1) -}}true{{- end -}}
{{- end -}}

{{- /* Where the routing document is mounted, if it is: a Secret or a ConfigMap. */ -}}
{{- define "router.documentVolume" -}}
{{- if .Values.routing.existingSecret -}}
secret:
  secretName: {{ .Values.routing.existingSecret }}
{{- else if .Values.routing.document -}}
configMap:
  name: {{ include "router.fullname" . }}-routing
{{- end -}}
{{- end -}}

{{- define "router.configUrl" -}}
{{- if include "router.documentVolume" . -}}
file:///etc/message-router/routing.json
{{- else -}}
{{- .Values.routing.url -}}
{{- end -}}
{{- end -}}

{{- /* Whether messages wait in a file of the pod's own volume: "true" or nothing. */ -}}
{{- define "router.isEmbedded" -}}
{{- if not (include "router.configUrl" .) -}}true
{{- else if contains "sqlite:" (toJson .Values.routing.document) -}}true
{{- else if eq (get .Values.settings "MESSAGE_ROUTER_QUEUE_TYPE" | toString | upper) "EMBEDDED" -}}true
{{- end -}}
{{- end -}}

{{- /* Whether failed groups of strict queues wait in a database: "true" or nothing. */ -}}
{{- define "router.hasOrderStore" -}}
{{- $name := "MESSAGE_ROUTER_ORDER_STORE" -}}
{{- if or (hasKey .Values.secrets.values $name) (hasKey .Values.secrets.existing $name) -}}true{{- end -}}
{{- end -}}

{{- /*
  Whether a queue of the document may store groups: "true" or nothing. A pool may make all of them strict. PostgreSQL and SQLite
  store nothing elsewhere; SQS FIFO and PGMQ with `fifo=true` only what a dead letter holds.
*/ -}}
{{- define "router.parks" -}}
{{- $byPool := contains "\"ordering\":\"strict\"" (toJson .Values.routing.document.processingPools) -}}
{{- range .Values.routing.document.queues -}}
{{- $uri := .queueUri | default .queueName | toString -}}
{{- $isStrict := eq (.ordering | default (ternary "strict" "batch" $byPool)) "strict" -}}
{{- $parks := not (or (has .onFailure (list "block" "skip")) (regexMatch "[.]fifo([?]|$)|^pgmq:.*fifo=true" $uri)) -}}
{{- $isElsewhere := not (regexMatch "^(postgresql|sqlite):" $uri) -}}
{{- if and $isStrict $isElsewhere (or $parks (eq (toString .onDeadLetter) "hold")) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether dead letters are in a file of the pod's own volume: "true" or nothing. */ -}}
{{- define "router.keepsDeadLetters" -}}
{{- $name := "MESSAGE_ROUTER_DEAD_LETTER_URL" -}}
{{- $elsewhere := or (hasKey .Values.secrets.values $name) (hasKey .Values.secrets.existing $name) -}}
{{- if not (or $elsewhere (hasKey .Values.settings $name)) -}}true{{- end -}}
{{- end -}}
