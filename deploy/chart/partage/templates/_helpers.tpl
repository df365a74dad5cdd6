{{/* Labels of every object. */}}
{{- define "partage.labels" -}}
app.kubernetes.io/name: partage
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Labels that select the agent's pods. They must not change: a DaemonSet's selector is immutable. */}}
{{- define "partage.node.selector" -}}
app.kubernetes.io/name: partage
app.kubernetes.io/component: node
{{- end }}

{{- define "partage.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The agents' user name in the API server. */}}
{{- define "partage.node.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:partage-node
{{- end }}

{{/* The settings file of the agent. Helm parses on and off as booleans; the agent expects strings. */}}
{{- define "partage.settings" -}}
{{- $settings := deepCopy .Values.settings }}
{{- range (append ($settings.nodes | default list) $settings) }}
{{- if kindIs "bool" .resize }}{{ $_ := set . "resize" (ternary "on" "off" .resize) }}{{ end }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* "yes" if the settings of any node have this value: (list . "driver" "nvidia"). */}}
{{- define "partage.any" -}}
{{- $key := index . 1 }}{{ $value := index . 2 }}{{ $settings := (index . 0).Values.settings }}
{{- $found := eq (toString (get $settings $key)) $value }}
{{- range ($settings.nodes | default list) }}{{ if eq (toString (get . $key)) $value }}{{ $found = true }}{{ end }}{{ end }}
{{- if $found }}yes{{ end }}
{{- end }}

{{/* The node labels in the settings, as a list of CEL strings. */}}
{{- define "partage.node.labels" -}}
{{- $keys := keys (.Values.settings.labels | default dict) }}
{{- range (.Values.settings.nodes | default list) }}{{ $keys = concat $keys (keys (.labels | default dict)) }}{{ end }}
{{- $quoted := list }}
{{- range ($keys | uniq | sortAlpha) }}{{ $quoted = append $quoted (squote .) }}{{ end }}
{{- join ", " $quoted }}
{{- end }}

{{/* CEL: the quoted names after `"labels":` in the annotation partage.dev/published of a node. */}}
{{- define "partage.published" -}}
{{ . }}.contains('"labels":') ? {{ . }}.substring({{ . }}.indexOf('"labels":') + 9).findAll('"[^"]*"') : []
{{- end }}

{{/* The port of metrics and probes. */}}
{{- define "partage.port" -}}
{{- regexFind "[0-9]+$" (dig "metrics" "address" "[::]:9394" .Values.settings) }}
{{- end }}

{{- define "partage.scheme" -}}
{{- if dig "metrics" "anonymous" false .Values.settings }}HTTP{{ else }}HTTPS{{ end }}
{{- end }}

{{/* Users that may write grants, as a list of CEL strings. */}}
{{- define "partage.trusted" -}}
{{- $users := list (squote (include "partage.node.user" .)) }}
{{- range .Values.admission.alsoTrusted }}{{ $users = append $users (squote .) }}{{ end }}
{{- join ", " $users }}
{{- end }}

{{/* CEL: whether an annotation of a pod is a record of a grant, in any dialect (docs/grants.md). */}}
{{- define "partage.record" -}}
{{ . }} in ['partage.dev/grant', 'scheduler.framework.gpushare.allocation',
'volcano.sh/vgpu-node', 'volcano.sh/vgpu-time', 'volcano.sh/vgpu-ids-new', 'volcano.sh/devices-to-allocate',
'volcano.sh/bind-phase', 'volcano.sh/bind-time', 'hami.io/vgpu-devices-allocated', 'hami.io/vgpu-node']
|| {{ . }}.startsWith('ALIYUN_COM_GPU_MEM_') || {{ . }}.contains('/predicate-gpu-idx-')
|| {{ . }}.endsWith('/predicate-node') || {{ . }}.endsWith('/predicate-time') || {{ . }}.endsWith('/gpu-assigned')
{{- end }}

{{/* CEL: whether a resource is Partage's, in any dialect (docs/dialects.md). */}}
{{- define "partage.resource" -}}
{{ . }}.startsWith('partage.dev/') || {{ . }}.startsWith('volcano.sh/vgpu-')
|| {{ . }} in ['aliyun.com/gpu-mem', 'aliyun.com/gpu-count', 'k8s.amazonaws.com/vgpu',
'nvidia.com/gpu', 'nvidia.com/gpumem', 'nvidia.com/gpumem-percentage', 'nvidia.com/gpucores']
|| {{ . }}.endsWith('/vcuda-core') || {{ . }}.endsWith('/vcuda-memory')
{{- end }}
